"""Poisoning of the stream by a caller that may only predict, with and without guards.

A learner is trained through a service, which keeps its canary from these sessions as by default.
Then an attacker sends 90 % of the traffic, the rest is honest. Accuracy is measured on held-out
images after every interval. Attacker, honest callers and measurement have different images. Each
attack runs on a copy of the learner's folder, on a service with the defaults and on one without
guards. Its threads are not started: everything runs in turn, so that a run can be repeated exactly.

The guards' thresholds were chosen on seed 0 of the first scenario, and on honest streams of signs
and of other shapes. The drill runs seed 1, and scenarios that were not looked at before.
"""

import multiprocessing
import shutil
import tempfile
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from dosapp.data.preprocess import to_bytes
from dosapp.drills.attacks import Attacker
from dosapp.drills.guards import GUARDS_OFF
from dosapp.errors import DosappError
from dosapp.experiments.plan import build_scenario
from dosapp.learner.learner import Learner, Prediction
from dosapp.runtime.files import read_json, write_json
from dosapp.runtime.rng import numpy_rng
from dosapp.service.service import LearningService
from dosapp.service.settings import ServiceSettings
from dosapp.settings import LearnerSettings, RunSettings, hash_key

SHAPES = {"data": "shapes", "classes": 50, "tasks": 5, "train_images": 8, "test_images": 48}
SCENARIOS: dict[str, dict[str, Any]] = {  # of DoSAPP, but for the second one
    "shapes": SHAPES,
    "default learner": {
        **SHAPES, "method": LearnerSettings().method, "head_session_drift": True
    },
    "hard": {"data": "shapes-hard", "classes": 30, "tasks": 3, "train_images": 20,
             "test_images": 80},
}  # fmt: skip
SEED = 1
SHARE = 0.9  # of the traffic is the attacker's
INTERVALS = 8
QUICK = ("honest", "blends, one class", "PGD, 16/255", "adaptive, all classes")
BATCH = 256  # images per prediction
SEMANTICS_VERSION = 1  # increased when the same attack would have another outcome
GUARDS_VERSION = 3  # increased when the guards would decide otherwise
STREAM_SETTINGS = ("interval", "adapt_batch_size", "max_queue", "confidence_gate", "skew_aware_ema")


@dataclass
class Turn:
    """What an attacker sees before a batch."""

    step: int  # from 0
    interval: int  # from 0
    version: int  # that answers


Make = Callable[[Attacker, int, Turn], Tensor]  # attacker, number of images, turn → images


@dataclass(frozen=True)
class Attack:
    """A way to fill the stream."""

    name: str
    make: Make
    share: float = SHARE
    intervals: int = INTERVALS
    caller: str = "honest"  # an attacker with the honest caller's token cannot be told from it


@dataclass
class Adaptive:
    """Knows the guards: sends as many blends as were published so far, and freezes nothing.

    After an interval that was published it sends a larger share of blends, after a refused one half
    as many, and after two in a row honest images only. The rest are honest images, which raise the
    margins of all other classes.
    """

    sources: Callable[[Attacker], Sequence[str] | None] = lambda attacker: None
    rotates: bool = False  # another target after every interval
    share: float = 0.5
    last_version: int = 0
    last_interval: int = -1
    refused: int = 0  # intervals in a row

    def __call__(self, attacker: Attacker, count: int, turn: Turn) -> Tensor:
        if turn.interval != self.last_interval:
            if turn.interval:
                is_published = turn.version > self.last_version
                self.refused = 0 if is_published else self.refused + 1
                self.share = min(1.0, 1.5 * self.share) if is_published else self.share / 2
            self.last_interval, self.last_version = turn.interval, turn.version
        blends = 0 if self.refused == 2 else round(self.share * count)
        names, sources = attacker.classes(), self.sources(attacker)
        target = names[turn.interval % len(names) if self.rotates else 0]
        parts = [attacker.blends(blends, target, sources)] if blends else []
        return torch.cat([*parts, attacker.honest(count - blends)])


def list_attacks(other_domain: Tensor) -> list[Attack]:
    """All attacks; the first two are none.

    Args:
        other_domain: Images of another domain, `uint8 [n, 3, H, W]`.
    """

    def perturb(eps: float) -> Make:
        return lambda a, n, turn: a.perturbed(n, a.classes()[0], eps)

    def choose(attacker: Attacker, turn: Turn, of: int) -> str:
        names = attacker.classes()
        return names[(turn.step % of) * len(names) // of]

    def send_other_domain(attacker: Attacker, count: int, turn: Turn) -> Tensor:
        return other_domain[torch.from_numpy(attacker.rng.integers(0, len(other_domain), count))]

    def blend_one(attacker: Attacker, count: int, turn: Turn) -> Tensor:
        return attacker.blends(count, attacker.classes()[0])

    def blend_four(attacker: Attacker, count: int, turn: Turn) -> Tensor:
        return attacker.blends(count, choose(attacker, turn, 4))

    def blend_pair(attacker: Attacker, count: int, turn: Turn) -> Tensor:
        return attacker.blends(count, attacker.classes()[0], attacker.classes()[1:2])

    return [
        Attack("honest", lambda a, n, turn: a.honest(n), share=0.0),
        Attack(
            "two honest callers, 90 and 10 %", lambda a, n, turn: a.honest(n), 0.1, caller="other"
        ),
        Attack("blends, one class", blend_one),
        Attack("blends, four classes", blend_four),
        Attack("blends, one pair", blend_pair),
        Attack("blends, own token", blend_one, caller="attacker"),
        Attack("blends, own token, 10 %", blend_one, share=0.1, caller="attacker"),
        # Once an interval is refused, this one gives half of what is learned from.
        Attack("blends, four classes, own token, 10 %", blend_four, share=0.1, caller="attacker"),
        Attack("slow drift", blend_one, share=0.3),
        *(Attack(f"PGD, {eps}/255", perturb(eps)) for eps in (2, 4, 8, 16)),
        Attack("near the boundary", lambda a, n, turn: a.near_boundary(n, choose(a, turn, 4))),
        Attack("one class", lambda a, n, turn: a.one_class(n)),
        Attack("one image", lambda a, n, turn: a.repeats(n)),
        Attack("noise", lambda a, n, turn: a.noise(n)),
        Attack("other domain", send_other_domain),
        Attack("refusals, own token", send_other_domain, 0.5, 12, "attacker"),  # to stop adaptation
        Attack("adaptive, all classes", Adaptive(), intervals=2 * INTERVALS),
        Attack("adaptive, one pair", Adaptive(lambda a: a.classes()[1:2]), intervals=2 * INTERVALS),
        Attack("adaptive, rotating", Adaptive(rotates=True), intervals=2 * INTERVALS),
    ]


@dataclass(frozen=True)
class Outcome:
    """What one attack did to one service."""

    attack: str
    guards: bool
    scenario: str
    seed: int
    accuracies: list[float]  # before, and after every interval
    refused: int  # intervals
    held: int  # images
    adapted: int
    frozen: str  # why adaptation stopped, "" if it did not

    @property
    def worst(self) -> float:
        """The largest loss of accuracy after any interval, in points; negative is a loss."""
        return min(self.accuracies) - self.accuracies[0]

    @property
    def change(self) -> float:
        """Accuracy gained at the end, in points."""
        return self.accuracies[-1] - self.accuracies[0]


@dataclass
class PoisonDrill:
    """A learner that was trained through a service, and images for everyone."""

    folder: Path  # of the learner
    scenario: str
    seed: int
    held_out: Tensor  # uint8 [n, 3, H, W]
    labels: list[str]  # [n], class names
    honest_images: Tensor
    attacker_images: Tensor
    other_domain: Tensor

    @classmethod
    def train(cls, folder: Path, scenario: str = "shapes", seed: int = SEED) -> "PoisonDrill":
        """Draw the images, and train a learner in sessions of a service that accepts them all.

        Args:
            folder: Where the learner goes.
            scenario: A name of `SCENARIOS`.
            seed: Of the learner, and of all choices.
        """
        settings: RunSettings = RunSettings.parse(
            {**SCENARIOS[scenario], "all_class_negatives": True, "seed": seed}
        )
        learner = Learner(settings.learner())
        elsewhere = settings.model_copy(update={"data": "signs"})
        other = build_scenario(elsewhere, learner.preprocess).tasks[0].unlabelled
        other_domain = to_bytes(other.read(range(len(other))))
        tasks = build_scenario(settings, learner.preprocess).tasks
        learner.save(folder, "new")
        # A default service refuses the second session of `hard`: it costs earlier classes too much.
        service = LearningService(folder, ServiceSettings(session_drop=100.0))
        held_out, stream = [], []
        labels: list[str] = []
        for task in tasks:
            images = to_bytes(task.train.read(range(len(task.train))))
            by_class = {
                name: images[np.flatnonzero(task.train.labels == n)]
                for n, name in enumerate(task.classes)
            }
            job = service.learn(by_class, "teacher")
            service.writer.run_waiting()
            if job.state != "done":
                raise DosappError(f"the session of the drill is {job.state}: {job.message}")
            held_out.append(to_bytes(task.test.read(range(0, len(task.test), 2))))
            labels += [task.classes[n] for n in task.test.labels[::2]]
            stream.append(to_bytes(task.unlabelled.read(range(len(task.unlabelled)))))
        images = torch.cat(stream)
        honest = torch.arange(len(images)) % 4 > 0
        return cls(
            folder, scenario, seed, torch.cat(held_out), labels, images[honest], images[~honest],
            other_domain,
        )  # fmt: skip

    def accuracy(self, service: LearningService) -> float:
        """Accuracy of the version that answers, on held-out images, in per cent."""
        predictions = _predict(service, self.held_out)
        return 100 * float(
            np.mean([p.label == name for p, name in zip(predictions, self.labels, strict=True)])
        )

    @cached_property
    def digest(self) -> str:
        """The digest of the trained learner."""
        return Learner.load(self.folder).digest()

    def find_or_run(self, attack: Attack, guards: bool, store: Path) -> Outcome:
        """Read the outcome of an attack; attack, and store the outcome, if there is none.

        Args:
            attack: What is sent.
            guards: Whether the service has its defaults; otherwise all guards are off.
            store: A folder of outcomes, each under the hash of what determines it.
        """
        settings = choose_settings(guards).model_dump()
        identity = {
            "meaning": [SEMANTICS_VERSION, GUARDS_VERSION] if guards else SEMANTICS_VERSION,
            "scenario": [self.scenario, SCENARIOS[self.scenario], self.seed],
            "learner": self.digest,
            "attack": [attack.name, attack.share, attack.intervals, attack.caller],
            "settings": {name: settings[name] for name in (*GUARDS_OFF, *STREAM_SETTINGS)},
        }
        file = store / f"{hash_key(identity)}.json"
        if file.exists():
            return Outcome(**read_json(file))
        outcome = self.run(attack, guards)
        write_json(file, asdict(outcome))
        return outcome

    def run(self, attack: Attack, guards: bool) -> Outcome:
        """Attack a copy of the learner.

        Args:
            attack: What is sent.
            guards: Whether the service has its defaults; otherwise all guards are off.
        """
        settings = choose_settings(guards)
        rng = numpy_rng("poison", self.seed, attack.name)
        size, sent = settings.adapt_batch_size, 0
        count = round(attack.share * size)
        with tempfile.TemporaryDirectory() as temporary:
            folder = Path(temporary) / "learner"
            shutil.copytree(self.folder, folder)
            service = LearningService(folder, settings)
            attacker = Attacker(
                self.attacker_images,
                lambda images: [p.label for p in _predict(service, images)],
                lambda: service.reader.published.learner,
                rng,
            )
            accuracies = [self.accuracy(service)]
            order = torch.from_numpy(rng.permutation(len(self.honest_images)))
            for step in range(attack.intervals * settings.interval):
                if service.writer.frozen:
                    break
                interval, number = divmod(step, settings.interval)
                if number == 0:
                    attacker.observe()
                turn = Turn(step, interval, service.version)
                rows = torch.arange(sent, sent + size - count) % len(order)
                sent += size - count
                honest = self.honest_images[order[rows]]
                made = attack.make(attacker, count, turn) if count else honest[:0]
                for images, caller in ((made, attack.caller), (honest, "honest")):
                    service.offer(images, _predict(service, images), caller)
                service.writer.run_waiting()
                if number == settings.interval - 1:
                    accuracies.append(self.accuracy(service))
            signals, frozen = service.writer.signals, service.writer.frozen
        return Outcome(attack.name, guards, self.scenario, self.seed, accuracies, signals.refused,
                       signals.held, signals.adapted, frozen)  # fmt: skip


def choose_settings(guards: bool) -> ServiceSettings:
    """The defaults of a service, or all guards off."""
    settings: ServiceSettings = ServiceSettings.parse({} if guards else GUARDS_OFF)
    return settings


def _predict(service: LearningService, images: Tensor) -> list[Prediction]:
    """The answers of the published version."""
    learner = service.reader.published.learner
    return [p for part in images.split(BATCH) for p in learner.predict(part, 1)]


def run_scenarios(
    folder: Path, store: Path, quick: bool, on_progress: Callable[[str], None]
) -> list[Outcome]:
    """Run all attacks on the first scenario, and those of `QUICK` on the others, unless quick.

    They run in two processes. Every outcome is stored as soon as it is known, and a drill that was
    stopped continues with those that are missing.

    Args:
        folder: For the learners, which must not exist yet.
        store: Where the outcomes are.
        quick: The first scenario only, and the attacks of `QUICK`.
        on_progress: Called with a message before each part.
    """
    first, *others = SCENARIOS
    drills = {}
    for scenario in [first] if quick else [first, *others]:
        on_progress(f"{scenario}: training through the service")
        drills[scenario] = PoisonDrill.train(folder / scenario, scenario)
    # Without guards an adaptive attacker has nothing to adapt to.
    runs = [
        (scenario, attack.name, guards)
        for guards in (True, False)
        for scenario, poison_drill in drills.items()
        for attack in list_attacks(poison_drill.other_domain)
        if attack.name in QUICK or (scenario == first and not quick)
        if guards or not attack.name.startswith("adaptive")
    ]
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(2, context, _set_drills, (drills, store)) as pool:
        futures = [pool.submit(_run, *run) for run in runs]
        outcomes = []
        for (scenario, name, guards), future in zip(runs, futures, strict=True):
            on_progress(f"{scenario}: {name}, guards {'on' if guards else 'off'}")
            outcomes.append(future.result())
    return outcomes


_drills: dict[str, PoisonDrill] = {}  # of a process of the pool, by scenario
_stores: list[Path] = []  # one


def _set_drills(drills: Mapping[str, PoisonDrill], store: Path) -> None:
    torch.set_num_threads(1)
    _drills.update(drills)
    _stores.append(store)


def _run(scenario: str, name: str, guards: bool) -> Outcome:
    attacks = list_attacks(_drills[scenario].other_domain)
    attack = next(attack for attack in attacks if attack.name == name)
    return _drills[scenario].find_or_run(attack, guards, _stores[0])


def to_json(outcomes: Sequence[Outcome]) -> dict[str, Any]:
    """The content of `poison.json`."""
    gains: dict[str, dict[str, float]] = {}
    for o in outcomes:
        if o.attack == "honest":
            side = "with_guards" if o.guards else "without_guards"
            gains.setdefault(o.scenario, {})[side] = o.change
    return {
        "outcomes": [asdict(o) for o in outcomes],
        "worst_loss": min(o.worst for o in outcomes if o.guards),
        "honest_gain": gains,
    }


def format_table(result: Mapping[str, Any]) -> str:
    """The tables of docs/reliability.md, one for each scenario of `poison.json`."""
    tables = []
    for scenario in dict.fromkeys(o["scenario"] for o in result["outcomes"]):
        rows = [o for o in result["outcomes"] if o["scenario"] == scenario]
        lines = [
            f"| {scenario} | off, worst | off, end | on, worst | on, end | refused | frozen |",
            "|---|---:|---:|---:|---:|---:|---|",
        ]
        for on in (o for o in rows if o["guards"]):
            off = [o for o in rows if o["attack"] == on["attack"] and not o["guards"]]
            numbers = _format_changes(off[0]) if off else ["–", "–"]
            numbers += [*_format_changes(on), str(on["refused"]), "yes" if on["frozen"] else "no"]
            lines.append(f"| {on['attack']} | {' | '.join(numbers)} |")
        tables.append("\n".join(lines) + "\n")
    return "\n".join(tables)


def _format_changes(outcome: Mapping[str, Any]) -> list[str]:
    """The worst and the last change of accuracy, in points."""
    changes = [accuracy - outcome["accuracies"][0] for accuracy in outcome["accuracies"]]
    return [f"{change:+.1f}".replace("-", "−") for change in (min(changes), changes[-1])]
