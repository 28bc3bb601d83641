"use strict";
// Class names and messages come from users: they reach the page as text nodes only.

const $ = id => document.getElementById(id);
const element = (tag, properties = {}, ...children) => {
  const node = Object.assign(document.createElement(tag), properties);
  node.append(...children);
  return node;
};
const percent = (share, digits = 0) => `${(100 * share).toFixed(digits)}\u00a0%`;
const plural = (count, one, many = one + "s") => `${count.toLocaleString()} ${count === 1 ? one : many}`;
const setText = (node, text) => { if (node.textContent !== text) node.textContent = text; };
const announce = text => setText($("announcement"), text);

// Requests

// The address printed by “dosapp serve” ends with #token=…, which browsers send to no server.
const linked = /^#token=([\w.-]+)$/.exec(location.hash)?.[1];
if (linked) history.replaceState(null, "", location.pathname + location.search);
let token = linked ?? sessionStorage.getItem("dosapp-token") ?? "";
let declined = false; // the token dialog was left without a token
let tokenDialog = null; // one dialog for all requests that wait for a token

class RequestError extends Error {
  constructor(message, code) { super(message); this.code = code; }
}

async function request(path, options = {}, isBackground = false) {
  const sent = token;
  const headers = { ...options.headers, ...(sent && { Authorization: `Bearer ${sent}` }) };
  let response;
  try {
    response = await fetch(path, { cache: "no-store", ...options, headers });
  } catch {
    throw new RequestError("the service does not answer", 0);
  }
  if (response.ok) return response.json();
  const message = (await response.json().catch(() => ({}))).error ?? `the service answered ${response.status}`;
  if (response.status === 401 && !(isBackground && declined)) {
    if (token === sent) await askForToken(sent);
    if (token && token !== sent) return request(path, options, isBackground);
  }
  throw new RequestError(response.status === 429 ? `busy, try again (${message})` : message, response.status);
}

const post = (path, body) => request(path, {
  method: "POST",
  ...(body instanceof FormData ? { body } : body && { body: JSON.stringify(body), headers: { "Content-Type": "application/json" } }),
});

const askForToken = rejected => tokenDialog ??= openTokenDialog(rejected).finally(() => { tokenDialog = null; });

async function openTokenDialog(rejected) {
  const given = await openDialog({
    title: "This service needs a token",
    text: rejected ? "The last token was not accepted." : "It is kept in this tab only. The first start of the service printed one; “dosapp token add” makes more.",
    button: "Use it", label: "Token", secret: true,
  });
  declined = !given;
  if (given) storeToken(given);
}

function storeToken(given) {
  token = given;
  if (token) sessionStorage.setItem("dosapp-token", token);
  else sessionStorage.removeItem("dosapp-token");
  $("sign-out").hidden = !token;
}

// Controls: one action at a time, and errors next to the control

async function runOnce(button, errorNode, action) {
  if (button.ariaDisabled === "true") return;
  button.ariaDisabled = "true";
  setText(errorNode, "");
  try {
    await action();
  } catch (error) {
    errorNode.textContent = error.message;
    if (!(error instanceof RequestError)) console.error(error);
  } finally {
    button.ariaDisabled = null;
  }
}

/** Open a dialog that closes when `action` succeeds. Resolves to its input, to null if cancelled. */
function openDialog({ title, text, button, label, value = "", secret, action = async () => {}, errorNode }) {
  return new Promise(resolve => {
    const field = element("input", { value, required: true, autocomplete: "off", type: secret ? "password" : "text", maxLength: 200 });
    const error = element("p", { className: "error", role: "alert" });
    const confirm = element("button", { className: "primary" }, button);
    const cancel = element("button", { type: "button", onclick: () => dialog.close() }, "Cancel");
    const form = element("form", {}, element("h2", {}, title), element("p", {}, text),
      ...(label ? [element("label", {}, element("span", {}, label), field)] : []), error, element("menu", {}, cancel, confirm));
    const dialog = element("dialog", { ariaLabel: title }, form);
    let result = null;
    form.onsubmit = event => {
      event.preventDefault();
      runOnce(confirm, error, async () => {
        const input = label ? field.value.trim() : true;
        try {
          await action(input);
        } catch (failure) {
          if (!dialog.open && errorNode) errorNode.textContent = failure.message;
          throw failure;
        }
        result = input;
        dialog.close();
      });
    };
    dialog.onclose = () => { dialog.remove(); resolve(result); };
    document.body.append(dialog);
    dialog.showModal();
    (label ? field : cancel).focus();
    field.select();
  });
}

// Files: chosen, dropped or pasted

const zones = { predict: predictFiles, "one-class": addClassImages, archive: files => chooseArchive(files[0]) };

function addFiles(zone, list) {
  const files = [...list];
  if (!files.length) return;
  if (live.status?.writes === false) zone = "predict";
  else if (/\.zip$/i.test(files[0].name)) zone = "archive";
  zones[zone](files);
}

for (const input of document.querySelectorAll("input[type=file]")) input.onchange = () => {
  addFiles(input.closest("[data-zone]").dataset.zone, input.files);
  input.value = "";
};

const findZone = node => (node instanceof Element && node.closest("[data-zone]")) || $("predict");
const highlight = zone => { for (const node of document.querySelectorAll("[data-zone]")) node.classList.toggle("over", node === zone); };
document.ondragleave = event => { if (!event.relatedTarget) highlight(null); };
document.ondragover = document.ondrop = event => {
  if (!event.dataTransfer.types.includes("Files")) return;
  event.preventDefault();
  const isDrop = event.type === "drop", zone = findZone(event.target);
  highlight(isDrop ? null : zone);
  if (isDrop) addFiles(zone.dataset.zone, event.dataTransfer.files);
};
document.onpaste = event => {
  if (!document.querySelector("dialog")) addFiles(findZone(document.activeElement).dataset.zone, event.clipboardData?.files ?? []);
};

function createThumbnail(file) {
  const image = element("img", { src: URL.createObjectURL(file), alt: file.name });
  image.onload = () => image.classList.toggle("tiny", image.naturalWidth < 96);
  return image;
}

function removeNodes(nodes) {
  for (const node of [...nodes]) {
    for (const image of node.matches("img") ? [node] : node.querySelectorAll("img")) URL.revokeObjectURL(image.src);
    node.remove();
  }
}

function showBars(list, entries, format) {
  list.replaceChildren(...entries.map(([name, share, value]) => {
    const row = element("li", {}, element("span", { title: name }, name), element("span", {}, format(value)));
    row.style.setProperty("--share", share);
    return row;
  }));
}

// Predict

const MAX_CARDS = 60, MAX_CONCURRENT = 4, UNSURE = 0.5;
const queue = [];
let active = 0, results = [];

function predictFiles(files) {
  const cards = files.map(file => {
    const content = element("div", { className: "content" }, element("h3", { className: "head" }, "…"));
    return { file, content, node: element("li", { className: "card" }, createThumbnail(file), content) };
  });
  $("predictions").prepend(...cards.map(card => card.node));
  removeNodes([...$("predictions").children].slice(Math.max(MAX_CARDS, cards.length)));
  $("clear").hidden = false;
  queue.push(...cards);
  predictNext();
}

function predictNext() {
  while (active < MAX_CONCURRENT && queue.length) {
    active++;
    predictCard(queue.shift()).finally(() => {
      active--;
      predictNext();
      if (active || !results.length) return;
      announce(`${plural(results.length, "image")}: ${results.slice(0, 10).join(", ")}`);
      results = [];
    });
  }
}

async function predictCard(card) {
  const { file, content } = card, form = new FormData();
  form.append("images", file, file.name || "image");
  try {
    const { version, predictions: [prediction] } = await post(`predict?top=5&learn=${$("adapt-to-images").checked}`, form);
    results.push(`${prediction.label} ${percent(prediction.score)}`);
    const list = element("ol", { className: "bars" });
    showBars(list, prediction.top.map(({ label, score }) => [label, score, score]), percent);
    const isUnsure = prediction.known && prediction.score < UNSURE;
    const name = element("h3", { className: prediction.known && !isUnsure ? "" : "unknown" }, isUnsure ? `unsure: ${prediction.label}?` : prediction.label);
    const source = `version ${version}${prediction.known ? "" : "; all scores are below the threshold"}`;
    content.replaceChildren(element("div", { className: "head" }, name, element("small", {}, source)), list, correctionForm(file));
  } catch (error) {
    results.push(`${file.name}: ${error.message}`);
    const retry = () => { content.replaceChildren(element("h3", { className: "head" }, "…")); queue.push(card); predictNext(); };
    content.replaceChildren(element("div", { className: "head" }, element("p", { className: "error" }, error.message), element("button", { onclick: retry }, "Try again")));
  }
}

// The demo's learner comes with an image of these classes
const SAMPLES = ["yellow striped cross", "orange plain arrow", "blue striped heart", "red hollow crescent", "pink checkered hexagon"];

function showSamples() {
  const known = SAMPLES.filter(name => live.classes.includes(name));
  $("samples").hidden = !known.length;
  $("samples").querySelector(".thumbnails").replaceChildren(...known.map(name => {
    const path = `samples/${name.replaceAll(" ", "-")}.png`;
    const button = element("button", { title: name }, element("img", { src: path, alt: `Predict a sample: ${name}`, className: "tiny" }));
    button.onclick = () => runOnce(button, $("predict-error"), async () => {
      const response = await fetch(path);
      if (!response.ok) throw new RequestError(`the service answered ${response.status}`, response.status);
      predictFiles([new File([await response.blob()], `${name}.png`, { type: "image/png" })]);
    });
    return button;
  }));
}

/** A button that opens a field for the true class of an image. */
function correctionForm(file) {
  const container = element("div", { className: "writes" });
  const start = element("button", { className: "link", ariaLabel: `Correct ${file.name}`, onclick: open }, "Correct");
  container.append(start);
  return container;

  function open() {
    let unknownLabel = null;
    const field = element("input", { required: true, maxLength: 200, autocomplete: "off" });
    field.setAttribute("list", "class-names");
    field.oninput = () => { if (field.value.trim() !== unknownLabel) setText(save, "Save"); };
    const error = element("p", { className: "error", role: "alert" }), save = element("button", {}, "Save");
    const cancel = element("button", { type: "button", className: "link", onclick: () => { container.replaceChildren(start); start.focus(); } }, "Cancel");
    const form = element("form", {}, element("label", {}, element("span", {}, "True class"), field), error, element("p", { className: "row" }, save, cancel));
    form.onsubmit = event => {
      event.preventDefault();
      runOnce(save, error, async () => {
        const label = field.value.trim();
        const body = { image: await readAsDataUrl(file), label, new_class: label === unknownLabel };
        try {
          showCorrections((await post("correct", body)).waiting);
        } catch (failure) {
          if (failure.code === 400 && failure.message.includes("new_class")) {
            unknownLabel = label;  // saving the same name again confirms it
            setText(save, `Save as the new class “${label}”`);
            throw new RequestError(failure.message.replace(/(Otherwise )?confirm a new class.*/, "").replace(/; $/, "."), 400);
          }
          throw failure;
        }
        const note = element("p", { tabIndex: -1 }, element("small", {}, `Corrected: ${label}.`));
        container.replaceChildren(note);
        note.focus();
        announce(`Corrected: ${label}`);
      });
    };
    container.replaceChildren(form);
    field.focus();
  }
}

const readAsDataUrl = file => new Promise((resolve, reject) => {
  const reader = new FileReader();
  reader.onload = () => resolve(reader.result);
  reader.onerror = () => reject(new RequestError(`'${file.name}' can no longer be read`, 0));
  reader.readAsDataURL(file);
});

function showCorrections(count) {
  const [message, learn, discard] = $("corrections").children;
  $("corrections").hidden = !count;
  setText(message, `${plural(count, "correction waits", "corrections wait")} for a session.`);
  learn.onclick = () => runOnce(learn, $("predict-error"), async () => {
    await sendSession({}, $("predict-jobs"));
    $("corrections").hidden = true;
  });
  discard.onclick = () => runOnce(discard, $("predict-error"), async () => {
    announce(`${plural((await post("correct/forget")).forgotten, "correction")} discarded`);
    $("corrections").hidden = true;
  });
}

$("clear").onclick = () => { queue.length = 0; removeNodes($("predictions").children); $("clear").hidden = true; $("predict-files").focus(); };

// Learn

let classImages = [], archive = null;

function addClassImages(files) {
  classImages.push(...files);
  $("one-class").querySelector(".thumbnails").append(...files.map(createThumbnail));
  showClassImages();
}

function showClassImages() {
  const remove = $("one-class").querySelector(".link");
  remove.hidden = !classImages.length;
  remove.textContent = `Remove ${plural(classImages.length, "image")}`;
  remove.onclick = () => { clearClassImages(); $("class-files").focus(); };
}

function clearClassImages() {
  classImages = [];
  removeNodes($("one-class").querySelector(".thumbnails").children);
  showClassImages();
}

function chooseArchive(file) {
  archive = file;
  setText($("archive").querySelector(".message"), file ? `${file.name}, ${Math.ceil(file.size / 1000).toLocaleString()} kB` : "");
}

let sending = 0; // sessions that the service may know already, but this page does not yet

/** Send a session and follow its job; `take` empties its form and returns how to fill it again. */
async function sendSession(body, container, take = () => null) {
  sending += 1;
  try {
    followJob(await post(`learn${sessionOptions()}`, body), container, take());
  } finally {
    sending -= 1;
  }
}

function learnOnSubmit(form, buildBody, take) {
  form.onsubmit = event => {
    event.preventDefault();
    runOnce(form.querySelector(".primary"), form.querySelector(".error"), () => sendSession(buildBody(), $("learn-jobs"), take));
  };
}

function sessionOptions() {
  const given = new URLSearchParams([...$("session-options").querySelectorAll("input")].filter(field => field.value).map(field => [field.name, field.value]));
  return String(given) && `?${given}`;
}

learnOnSubmit($("one-class"), () => {
  const name = $("class-name").value.trim(), form = new FormData();
  if (!name || !classImages.length) throw new RequestError(name ? "give at least one image" : "give the class a name", 0);
  form.append("name", name);
  for (const file of classImages) form.append("images", file, file.name || "image");
  return form;
}, () => {
  const name = $("class-name").value, files = classImages;
  clearClassImages();
  $("class-name").value = "";
  $("class-files").focus();
  return () => { clearClassImages(); addClassImages(files); $("class-name").value = name; };
});

learnOnSubmit($("archive"), () => {
  if (!archive) throw new RequestError("choose a zip first", 0);
  const form = new FormData();
  form.append("archive", archive);
  return form;
}, () => {
  const file = archive;
  chooseArchive(null);
  return () => chooseArchive(file);
});

// Jobs: followed to their end, also those that another client has started

const followedJobs = new Map();
const END_STATES = { refused: "Refused", failed: "Failed", cancelled: "Cancelled" };

async function followJob(job, container, fillForm = null) {
  if (followedJobs.has(job.id)) { container.prepend(followedJobs.get(job.id)); return; }
  const names = `${job.classes.slice(0, 3).join(", ")}${job.classes.length > 3 ? ", …" : ""}`;
  const title = element("span", { className: "grow" }), bar = element("progress", { max: 1, ariaLabel: `Session: ${names}` });
  const error = element("p", { className: "error", role: "alert" }), message = element("p", { className: "message", role: "status" });
  const cancel = element("button", { onclick: () => runOnce(cancel, error, async () => {
    await post(`jobs/${job.id}/cancel`);
    cancel.textContent = "Cancelling…";
  }) }, "Cancel");
  const node = element("div", { className: "job" }, element("div", { className: "row" }, title, cancel), bar, error, message);
  followedJobs.set(job.id, node);
  container.prepend(node);
  while (job.state === "waiting" || job.state === "learning") {
    const steps = job.of ? `, step ${job.step} of ${job.of}` : "", loss = job.loss == null ? "" : `, loss ${job.loss.toFixed(2)}`;
    setText(title, `${job.state === "waiting" ? "Waiting to learn" : "Learning"} ${names}${steps}${loss}`);
    if (job.of) bar.value = job.step / job.of;
    await new Promise(resolve => setTimeout(resolve, 300));
    await untilVisible();
    try {
      job = await request(`jobs/${job.id}`, {}, true);
    } catch (failure) {
      if (failure.code === 403) return node.remove();
      if (failure.code === 404) job = { ...job, state: "failed", said: "the service does not know it any more" };
    }
  }
  title.remove(); cancel.remove(); bar.remove();
  message.textContent = job.state === "done"
    ? `Learned ${names} from ${plural(job.images, "image")}: version ${job.version} answers now.`
    : `${END_STATES[job.state]}: ${names}, ${job.said}.`;
  message.classList.toggle("error", job.state !== "done" && job.state !== "cancelled");
  if (job.state === "refused") $("session-options").open = true;
  if (fillForm && job.state !== "done") {
    const again = element("button", { onclick: () => { fillForm(); node.remove(); } }, "Fill in the form again");
    node.append(element("p", {}, again));
  }
  update();
}

const untilVisible = () => document.hidden
  ? new Promise(resolve => document.addEventListener("visibilitychange", resolve, { once: true }))
  : undefined;

// Monitor

const MAX_SAMPLES = 120, RATE_SECONDS = 5;
const live = { status: null, samples: [], classes: [], versions: [], listed: 0 };
let timer, isUpdating = false;

async function update() {
  clearTimeout(timer);
  if (document.hidden || isUpdating) return;
  isUpdating = true;
  try {
    const status = await request("status", {}, true);
    showStatus(status);
    if (status.version !== live.listed) await listVersions(status.version);
    setText($("trouble"), status.trouble ? `Not saved: ${status.trouble}` : "");
    $("sign-in").hidden = true;
  } catch (error) {
    setText($("trouble"), error.code ? error.message : "The service does not answer; trying again.");
    $("sign-in").hidden = error.code !== 401;
    if (!(error instanceof RequestError)) console.error(error);
  } finally {
    isUpdating = false;
  }
  timer = setTimeout(update, 1000);
}

document.addEventListener("visibilitychange", update);
$("sign-in").firstElementChild.onclick = () => askForToken("").then(update);
$("sign-out").onclick = () => { storeToken(""); declined = true; update(); };

function showStatus(status) {
  const { samples } = live, signals = status.signals ?? {};
  if (samples.length && status.seconds < samples.at(-1).seconds) samples.length = 0; // it has restarted
  live.status = status;
  document.querySelector("main").hidden = false;
  document.body.classList.toggle("read-only", !status.writes);
  document.body.classList.toggle("no-adaptation", !status.adapts);
  const mode = !status.writes ? "replica" : !status.adapts ? "does not adapt to its stream" : status.frozen ? "frozen" : "adapts to its stream";
  setText($("summary"), `version ${status.version} · ${plural(status.classes, "class", "classes")} · ${mode}`);
  const reason = status.frozen?.replace(/^frozen /, "");
  const leftOut = status.left_out?.length ? `Not learned from until the next session: ${status.left_out.join(", ")}. Their images were refused.` : "";
  setText($("frozen"), reason ? `Frozen: ${reason}. It predicts and learns sessions, but does not adapt to its stream.` : status.adaptation_off || leftOut);
  $("freeze").hidden = false;
  setText($("freeze"), status.frozen ? "Unfreeze" : "Freeze");

  samples.push({
    seconds: status.seconds, answered: status.answered, adapted: signals.adapted ?? 0,
    confidence: signals.confidence, disagreement: signals.disagreement,
  });
  samples.splice(0, samples.length - MAX_SAMPLES);
  const last = samples.at(-1), first = samples.find(sample => sample.seconds >= last.seconds - RATE_SECONDS);
  const rate = name => last.seconds > first.seconds ? (last[name] - first[name]) / (last.seconds - first.seconds) : 0;
  last.answerRate = rate("answered");
  last.adaptRate = rate("adapted");

  showTiles({ version: status.version, classes: status.classes, predicted: status.answered, waiting: status.waiting });
  if (status.adapts) {
    showTiles({
      "in stream": status.stream, "adapted to": signals.adapted, "held back": signals.held,
      skipped: signals.skipped, refused: signals.refused,
    });
  }

  const line = name => samples.map(sample => [sample.seconds, sample[name] ?? null]);
  const span = `last ${Math.max(1, Math.round(last.seconds - samples[0].seconds))} s`;
  const top = Math.max(1, ...samples.map(sample => Math.max(sample.answerRate, sample.adaptRate)));
  const perSecond = value => value.toFixed(value < 10 ? 1 : 0);
  showChart("images per second", span, [line("answerRate"), ...(status.adapts ? [line("adaptRate")] : [])], [0, top], perSecond,
    [`${perSecond(last.answerRate)} predicted`, ...(status.adapts ? [`${perSecond(last.adaptRate)} adapted`] : [])]);
  if (status.adapts) {
    for (const name of ["confidence", "disagreement"])
      showChart(name, span, [line(name)], [0, 1], percent, [signals[name] == null ? "–" : percent(signals[name])]);
    const counts = Object.entries(signals.histogram), most = Math.max(...counts.map(([, count]) => count));
    showBars($("histogram"), counts.slice(0, 15).map(([name, count]) => [name, count / most, count]), String);
    if (counts.length > 15) $("histogram").append(element("li", {}, `and ${counts.length - 15} more`));
    if (!counts.length) $("histogram").append(element("li", { className: "note" }, "Nothing yet."));
  }
  if (status.writes) {
    showCorrections(status.corrections);
    // While one is sent, its job may be among them; it is followed by who sent it.
    if (!sending) for (const job of status.jobs) if (!followedJobs.has(job.id)) followJob(job, $("learn-jobs"));
  }
}

/** Find the child of a container by its name; create it if it is not there. */
function namedChild(container, name, create) {
  const existing = [...container.children].find(node => node.dataset.name === name);
  if (existing) return existing;
  const node = create();
  node.dataset.name = name;
  container.append(node);
  return node;
}

function showTiles(values) {
  for (const [name, value] of Object.entries(values)) {
    const tile = namedChild($("tiles"), name, () => element("div", {}, element("dt", {}, name), element("dd")));
    setText(tile.lastChild, value.toLocaleString());
  }
}

function svgElement(tag, attributes) {
  const node = document.createElementNS("http://www.w3.org/2000/svg", tag);
  for (const [name, value] of Object.entries(attributes)) node.setAttribute(name, value);
  return node;
}

/** Draw lines over a common x axis; a null value is a gap. */
function showChart(name, span, lines, [low, high], format, values) {
  const figure = namedChild($("charts"), name, () => element("figure", {},
    element("figcaption", {}, element("span"), element("b")),
    svgElement("svg", { viewBox: "0 0 100 100", preserveAspectRatio: "none", role: "img" }),
    element("div", { className: "scale" }, element("span"), element("span"))));
  const [caption, svg, scale] = figure.children;
  caption.firstChild.replaceChildren(`${name} `, element("small", {}, span));
  caption.lastChild.replaceChildren(...values.flatMap((value, n) => [n ? ", " : "", element("span", { className: n ? "second-text" : "" }, value)]));
  svg.setAttribute("aria-label", `${name}, ${span}: ${values.join(", ")}`);
  setText(scale.firstChild, format(high));
  setText(scale.lastChild, format(low));
  const xs = lines[0].map(([x]) => x), width = xs.at(-1) - xs[0] || 1;
  svg.replaceChildren();
  lines.forEach((line, n) => {
    let command = "M", d = "", point = "";
    for (const [x, y] of line) {
      if (y == null) { command = "M"; continue; }
      point = `${(100 * (x - xs[0]) / width).toFixed(2)} ${(100 - 100 * (y - low) / (high - low)).toFixed(2)}`;
      d += command + point;
      command = "L";
    }
    const kind = n ? "second" : "first";
    if (point) svg.append(svgElement("path", { d, class: kind }), svgElement("path", { d: `M${point}h0`, class: `${kind} dot` }));
  });
}

// Classes and versions, read again when the version changes

async function listVersions(version) {
  const [known, versions] = await Promise.all([request("classes", {}, true), request("versions", {}, true)]);
  if (JSON.stringify(known.classes) !== JSON.stringify(live.classes) || !live.listed) {
    live.classes = known.classes;
    $("class-names").replaceChildren(...known.classes.slice(0, 1000).map(name => element("option", { value: name })));
    showClasses();
    showSamples();
  }
  const measured = versions.filter(({ seen }) => seen.canary != null);
  live.versions = versions.reverse();
  showVersions(version);
  if (measured.length) {
    const points = measured.map(({ number, seen }) => [number, seen.canary / 100]), ys = points.map(([, y]) => y);
    const middle = (Math.max(...ys) + Math.min(...ys)) / 2, half = Math.max(0.05, Math.max(...ys) - middle) * 1.2;
    showChart("canary accuracy", `versions ${points[0][0]} to ${points.at(-1)[0]}`, [points],
      [Math.max(0, middle - half), Math.min(1, middle + half)], percent, [percent(ys.at(-1), 1)]);
  }
  live.listed = version;
}

const MAX_CLASSES = 60;
function showClasses() {
  const search = $("class-search").querySelector("input").value.trim().toLowerCase();
  const matches = live.classes.filter(name => name.toLowerCase().includes(search));
  $("class-search").hidden = live.classes.length <= MAX_CLASSES;
  setText($("more-classes"), !live.classes.length ? "None yet." : matches.length > MAX_CLASSES ? `and ${matches.length - MAX_CLASSES} more` : "");
  $("classes").replaceChildren(...matches.slice(0, MAX_CLASSES).map(name => element("li", {}, element("span", {}, name),
    element("button", { className: "link writes", ariaLabel: `Rename ${name}`, onclick: () => renameClass(name) }, "Rename"),
    element("button", { className: "link writes", ariaLabel: `Remove ${name}`, onclick: () => removeClass(name) }, "Remove"))));
}
$("class-search").querySelector("input").oninput = showClasses;

async function change(dialog) {
  if (await openDialog(dialog) === null) return;
  await update();
  if (document.activeElement === document.body) $("classes-title").focus();
}

const renameClass = name => change({
  title: `Rename “${name}”`, text: "The class gets another name, as a new version.", button: "Rename", label: "New name", value: name,
  errorNode: $("classes-error"), action: to => post("classes/rename", { name, to }),
});
const removeClass = name => change({
  title: `Remove “${name}”?`, text: "The class is no longer predicted. The weights stay as they were trained; a rollback brings it back.",
  button: "Remove", errorNode: $("classes-error"), action: () => post("classes/remove", { name }),
});

let shownVersions = 10;
$("older").onclick = () => { shownVersions = Infinity; showVersions(live.listed); };

function showVersions(current) {
  const container = $("version-rows"), old = new Map([...container.children].map(row => [row.dataset.key, row]));
  const rows = live.versions.slice(0, shownVersions).map(version => {
    const isCurrent = version.number === current, key = `${version.number} ${version.checksum} ${isCurrent}`;
    return old.get(key) ?? createVersionRow(version, isCurrent, key); // rows that stay keep the focus
  });
  for (const row of old.values()) if (!rows.includes(row)) row.remove();
  rows.forEach((row, n) => { if (container.children[n] !== row) container.insertBefore(row, container.children[n] ?? null); });
  $("older").hidden = live.versions.length <= shownVersions;
}

function createVersionRow(version, isCurrent, key) {
  const time = new Date(version.created), canary = version.seen.canary;
  const shortTime = time.toLocaleString([], { month: "short", day: "numeric", hour: "2-digit", minute: "2-digit" });
  const cell = (child, data = {}) => {
    const node = element("td", { role: "cell" }, child);
    Object.assign(node.dataset, data); // headings for a narrow screen
    return node;
  };
  const back = element("button", { className: "link writes", ariaLabel: `Roll back to version ${version.number}`, onclick: () => rollback(version) }, "Roll back");
  const row = element("tr", { role: "row", className: isCurrent ? "current" : "" },
    cell(String(version.number), { name: "version" }),
    cell(element("time", { dateTime: version.created, title: time.toLocaleString() }, shortTime)),
    cell(version.reason), cell(String(version.class_count), { unit: "classes" }),
    cell(Math.ceil(version.size / 1000).toLocaleString(), { unit: "kB" }),
    cell(canary == null ? "" : percent(canary / 100, 1), { name: "canary" }), cell(isCurrent ? "current" : back));
  row.dataset.key = key;
  return row;
}

const rollback = ({ number, reason, class_count }) => change({
  title: `Roll back to version ${number}?`, button: "Roll back", errorNode: $("versions-error"),
  text: `“${reason}”, with ${plural(class_count, "class", "classes")}, is appended as a new version and answers from then on. All versions are kept.`,
  action: () => post("rollback", { version: number }),
});

$("freeze").onclick = () => change(live.status.frozen
  ? { title: "Unfreeze?", text: "It adapts to its stream again.", button: "Unfreeze", errorNode: $("versions-error"), action: () => post("unfreeze") }
  : { title: "Freeze?", text: "It still predicts and learns sessions, but does not adapt to its stream until you unfreeze it.", button: "Freeze", errorNode: $("versions-error"), action: () => post("freeze") });

storeToken(token);
update();
