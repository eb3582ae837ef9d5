"""Whole commands raced in turn."""

from bench.race import compete


def test_each_has_its_turn_and_none_is_always_behind_the_same():
    taken = compete({name: ["sh", "-c", f"echo {name}; date +%s%N"] for name in "ab"}, 3)
    started = sorted((int(done.out.split()[1]), name) for name, some in taken.items() for done in some)
    assert "".join(name for _, name in started) == "abbaab"
