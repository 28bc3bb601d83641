"""Shares of callers in the stream, and the skew of a caller's labels."""

from collections import Counter

import torch

from dosapp.service.guards import Guard
from dosapp.service.settings import ServiceSettings
from dosapp.service.stream import RECENT, Stream, StreamSample


def sample(caller: str, label: str = "fox", time: float = 0.0) -> StreamSample:
    return StreamSample(torch.zeros(3, 2, 2, dtype=torch.uint8), label, 0.9, time, caller)


def make_stream(counts: dict[str, int], **settings) -> Stream:
    stream = Stream(ServiceSettings(adapt_batch_size=8, **settings))
    for caller, count in counts.items():
        for n in range(count):
            stream.put(sample(caller, time=float(n)))
    return stream


def shares(batch: list[StreamSample] | None) -> dict[str, int]:
    return dict(Counter(s.caller for s in batch or []))


class TestShares:
    def test_a_single_caller_gives_all_of_a_step_in_order(self) -> None:
        batch = make_stream({"a": 20}).take(at_least=8)
        assert [s.time for s in batch or []] == list(range(8))

    def test_callers_give_what_they_send(self) -> None:
        stream, taken = make_stream({}), Counter[str]()
        for caller in ("main", "main", "main", "other") * 8:
            stream.put(sample(caller))
            taken += Counter(shares(stream.take(at_least=8)))
        assert taken == {"main": 24, "other": 8}

    def test_with_a_bound_one_caller_gives_half_while_others_send(self) -> None:
        stream = make_stream({"flood": 90, "honest": 10})
        assert shares(stream.take(8, lambda _: 0.5)) == {"flood": 4, "honest": 4}
        assert shares(stream.take(8, lambda _: 0.5)) == {"flood": 4, "honest": 4}
        assert stream.take(8, lambda _: 0.5) is None  # two honest images wait
        assert shares(stream.take(1, lambda _: 0.5)) == {"flood": 2, "honest": 2}
        assert stream.take(1, lambda _: 0.5) is None

    def test_another_bound(self) -> None:
        stream = make_stream({"flood": 30, "honest": 2})
        assert shares(stream.take(8, lambda _: 0.75)) == {"flood": 6, "honest": 2}

    def test_only_the_one_that_sends_most_is_bound(self) -> None:
        stream = make_stream({"main": 30, "other": 3})
        shares_of = {"main": 1.0, "other": 0.5}
        assert shares(stream.take(8, shares_of.__getitem__)) == {"main": 5, "other": 3}

    def test_others_who_send_almost_nothing_bound_nobody(self) -> None:
        stream = make_stream({"ping": 1, "main": 60})
        assert len(stream.take(8, lambda _: 0.5) or []) == 8

    def test_others_who_left_bound_nobody(self) -> None:
        stream = make_stream({"gone": 8, "main": 8})
        while stream.take(1, lambda _: 0.5):
            pass
        for _ in range(RECENT):
            stream.put(sample("main"))
        assert shares(stream.take(8, lambda _: 0.5)) == {"main": 8}

    def test_a_full_queue_drops_images_of_the_caller_with_the_most(self) -> None:
        stream = make_stream({"flood": 30}, max_queue=10)
        assert len(stream) == 10
        assert [stream.put(sample("honest")) for _ in range(3)] == [True] * 3
        assert shares(stream.take(1, lambda _: 0.5)) == {"flood": 3, "honest": 3}

    def test_three_callers_take_turns(self) -> None:
        stream = make_stream({"a": 9, "b": 9, "c": 2})
        assert shares(stream.take(at_least=8)) == {"a": 3, "b": 3, "c": 2}

    def test_others_do_not_wait_for_a_caller_that_is_dropped(self) -> None:
        stream = make_stream({"flood": 20, "honest": 8})
        assert stream.drop_caller("flood") == 20
        assert shares(stream.take(8, lambda _: 0.5)) == {"honest": 8}
        assert stream.drop_caller("flood") == 0


class TestSkew:
    def test_images_of_a_skewed_caller_are_held_and_others_are_not(self) -> None:
        guard = Guard(ServiceSettings())
        mixed = [sample("honest", f"class {n % 8}") for n in range(32)]
        skewed = [sample("flood", "fox") for _ in range(32)]
        trusted = guard.choose_trusted([*mixed, *skewed], 8)
        assert shares(trusted) == {"honest": 32}

    def test_a_skewed_caller_is_bound_and_others_are_not(self) -> None:
        guard = Guard(ServiceSettings())
        mixed = [sample("honest", f"class {n % 8}") for n in range(32)]
        guard.choose_trusted([*mixed, *[sample("flood", "fox") for _ in range(32)]], 8)
        assert [guard.caller_share(name) for name in ("flood", "honest")] == [0.5, 1.0]
        guard.choose_trusted([sample("flood", f"class {n % 8}") for n in range(64)], 8)
        assert guard.caller_share("flood") == 1.0
        guard.refuse([])
        assert guard.caller_share("honest") == 0.5

    def test_a_few_equal_labels_are_no_skew(self) -> None:
        guard = Guard(ServiceSettings())
        mixed = [sample("honest", f"class {n % 8}") for n in range(32)]
        assert len(guard.choose_trusted([*mixed, sample("new"), sample("new")], 8)) == 34

    def test_a_batch_of_one_class_is_held(self) -> None:
        batch = [sample(f"caller {n}") for n in range(8)]
        assert Guard(ServiceSettings()).choose_trusted(batch, 8) == []

    def test_a_caller_is_trusted_again_when_its_labels_are_mixed(self) -> None:
        guard = Guard(ServiceSettings())
        assert guard.choose_trusted([sample("a") for _ in range(64)], 8) == []
        mixed = [sample("a", f"class {n % 8}") for n in range(64)]
        assert len(guard.choose_trusted(mixed, 8)) == 64
