"""What Python callers hand to a loaded bundle: the types it takes, and how the others are refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from pairs import FORCED, MAX_LENGTH, NAMES, K, Pairs

from graphspec.errors import BundleError, ConfigError, RequestError
from graphspec.runtime.generate import LoadedBundle, load
from graphspec.runtime.requests import checked_params, checked_prompts
from graphspec.runtime.sampling import SamplingParams

LAST = 127
"""The vocabulary's last token."""


@pytest.mark.parametrize(
    ("prompts", "taken"),
    [
        ("abc", ["abc"]),
        (["abc", [1, 2]], ["abc", (1, 2)]),
        ((("abc"), (1, 2)), ["abc", (1, 2)]),
        ([np.array([3, 4], np.int32), range(2)], [(3, 4), (0, 1)]),
        (np.array([[3, 4], [5, 6]]), [(3, 4), (5, 6)]),
        (iter(["a", iter([1])]), ["a", (1,)]),
        ([], []),
    ],
    ids=range(7),
)
def test_prompts_of_many_kinds_are_taken(prompts: object, taken: list[object]) -> None:
    assert checked_prompts(prompts) == taken
    assert all(type(token) is int for prompt in checked_prompts(taken) if isinstance(prompt, tuple) for token in prompt)


@pytest.mark.parametrize(
    ("prompts", "said"),
    [
        (None, "the prompts are None: give a text, or a list"),
        (5, "the prompts are 5"),
        (b"abc", "the prompts are b'abc'"),
        ({"role": "user"}, "the prompts are {'role': 'user'}"),
        ({"a"}, "the prompts are {"),
        ([1, 2, 3], "a prompt is 1: .*; one prompt of token ids is a list in a list"),
        ([None], "a prompt is None: it must be a text or a list of token ids"),
        ([b"abc"], "a prompt is b'abc'"),
        ([["a", "b"]], r"a prompt is \['a', 'b'\]"),
        ([[1.5]], r"a prompt is \[1.5\]"),
        ([np.array([1.5])], r"a prompt is array\(\[1.5\]\)"),
        ([{"role": "user", "content": "x"}], "a prompt is {"),
        ([["a" * 5000]], "a prompt is .{1,80}: it must be"),
    ],
    ids=lambda value: str(value)[:30],
)
def test_prompts_of_other_kinds_are_refused_in_a_line(prompts: object, said: str) -> None:
    with pytest.raises(RequestError, match=said) as caught:
        checked_prompts(prompts)
    assert len(str(caught.value)) < 300


@pytest.mark.parametrize(
    ("params", "said"),
    [
        ({"temperature": 1.0}, "the sampling parameters are {'temperature': 1.0}: give SamplingParams"),
        (0.7, "the sampling parameters are 0.7"),
        ("greedy", "the sampling parameters are 'greedy'"),
        ([SamplingParams(), None], "the sampling parameters are None"),
        ([SamplingParams()], "2 prompts and 1 sets of sampling parameters"),
        ([], "2 prompts and 0 sets"),
    ],
)
def test_sampling_parameters_of_other_kinds_are_refused(params: object, said: str) -> None:
    with pytest.raises(RequestError, match=said):
        checked_params(params, 2)
    assert checked_params(None, 2) == [SamplingParams()] * 2


@pytest.fixture
def bundle(pairs: Pairs) -> LoadedBundle:
    return pairs.loaded(NAMES[3])


CALLS: list[tuple[dict[str, Any], str]] = [
    ({"width": "2"}, "width '2' is not in this bundle"),
    ({"width": "1:1,2:9"}, "width 9 of the schedule 1:1,2:9 is not in this bundle"),
    ({"width": "1:x"}, "width: '1:x' is not a schedule"),
    ({"width": True}, "width True is not in this bundle"),
    ({"width": 1.0}, "width 1.0 is not in this bundle"),
    ({"width": [1]}, r"width \[1\] is not in this bundle"),
    ({"prefill_chunk": 0}, "prefill_chunk is 0; it must be an integer of at least 1"),
    ({"prefill_chunk": 2.0}, "prefill_chunk is 2.0"),
    ({"prefill_chunk": None}, "prefill_chunk is None"),
    (
        {"params": SamplingParams(stop_token_ids=(3, LAST + 1))},
        f"stop_token_ids holds {LAST + 1}, .* tokens 0 to {LAST}",
    ),
    ({"prompts": [[0, LAST + 1]]}, f"token {LAST + 1}; the vocabulary has tokens 0 to {LAST}"),
    ({"prompts": [[-1]]}, "token -1"),
]


@pytest.mark.slow
@pytest.mark.parametrize(("options", "said"), CALLS)
@pytest.mark.parametrize("method", ["generate", "stream"])
def test_a_call_that_makes_no_sense_is_refused_at_once(
    bundle: LoadedBundle, method: str, options: dict[str, Any], said: str
) -> None:
    with pytest.raises(RequestError, match=said):
        getattr(bundle, method)(**{"prompts": "abc", **options})


@pytest.mark.slow
def test_the_last_token_of_the_vocabulary_may_stop_an_answer(bundle: LoadedBundle) -> None:
    params = SamplingParams(stop_token_ids=(LAST,), max_new_tokens=2)
    assert bundle.generate("abc", params)[0].token_ids


@pytest.mark.slow
def test_texts_and_messages_are_checked(bundle: LoadedBundle) -> None:
    for text in (5, None, b"abc", ["abc"]):
        with pytest.raises(RequestError, match="it must be a string"):
            bundle.encode(text)  # type: ignore[arg-type]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"bundle": 5}, "the bundle is 5: it must be a path"),
        ({"bundle": None}, "the bundle is None"),
        ({"max_batch_size": "2"}, "max_batch_size is '2': it must be an integer"),
        ({"max_batch_size": True}, "max_batch_size is True"),
        ({"num_threads": 1.0}, "num_threads is 1.0"),
    ],
)
def test_load_checks_what_it_is_given(pairs: Pairs, options: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        load(**{"bundle": pairs.bundle(NAMES[3]), **options})
    with pytest.raises(BundleError):
        load(Path("nowhere"))


@pytest.mark.slow
def test_a_closed_bundle_says_so(pairs: Pairs) -> None:
    loaded = load(pairs.bundle(FORCED), num_threads=1)
    begun = loaded.stream(["abc", "xyz"], SamplingParams(max_new_tokens=20))
    next(begun)
    loaded.close()
    loaded.close()
    for ask in (lambda: loaded.generate("abc"), lambda: loaded.stream("abc"), lambda: list(begun)):
        with pytest.raises(RequestError, match="this bundle is closed: load it again"):
            ask()


@pytest.mark.slow
@pytest.mark.parametrize("width", [0, K])
def test_only_the_last_piece_of_an_answer_may_have_no_text(pairs: Pairs, width: int) -> None:
    """Half a stop string is held back; the tokens of a text come with it."""
    bundle = pairs.loaded(NAMES[0])
    (whole,) = bundle.generate("abc", SamplingParams(max_new_tokens=40, seed=1))
    params = [
        SamplingParams(max_new_tokens=40, seed=1, stop=(whole.text[start:end] + "\0",))
        for start, end in ((0, 9), (3, 20), (30, 40), (0, 40))
    ]
    pieces = list(bundle.stream(["abc"] * len(params), params, width=width))
    assert any(len(piece.token_ids) > K + 1 for piece in pieces), "nothing was held back"
    assert all(piece.text for piece in pieces if piece.generation is None)
    for index in range(len(params)):
        own = [piece for piece in pieces if piece.index == index]
        assert "".join(piece.text for piece in own) == whole.text
        assert tuple(token for piece in own for token in piece.token_ids) == whole.token_ids
        last = own[-1].generation
        assert last is not None
        assert (last.text, last.token_ids) == (whole.text, whole.token_ids)


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_streams_consumed_in_turns_are_as_if_alone(pairs: Pairs, name: str) -> None:
    """Two generators of one bundle: each runs steps whenever it is asked, on rows beside the other's."""
    bundle = pairs.loaded(name)
    asked: list[tuple[list[str | list[int]], SamplingParams]] = [
        ([[5, 9, 5, 9, 5], "xyz", [3]], SamplingParams(max_new_tokens=30, seed=2)),
        (["abcabcabc", [7] * 40], SamplingParams(max_new_tokens=23, temperature=0.9, seed=3)),
        ([[1, 2, 3]], SamplingParams(max_new_tokens=MAX_LENGTH, temperature=1.2, seed=4)),
    ]
    alone = [bundle.generate(prompts, params) for prompts, params in asked]
    streams = [bundle.stream(prompts, params) for prompts, params in asked]
    answers: list[dict[int, Any]] = [{} for _ in asked]
    open_streams = list(range(len(asked)))
    while open_streams:
        for number in list(open_streams):
            piece = next(streams[number], None)
            if piece is None:
                open_streams.remove(number)
            elif piece.generation is not None:
                answers[number][piece.index] = piece.generation
    assert [[found[i] for i in range(len(found))] for found in answers] == alone
