"""graphspec beside llama.cpp, ONNX Runtime GenAI, OpenVINO GenAI and transformers: one model, the same prompts, greedy,
the same cores, in turn.

    python benchmarks/peers/compare.py --gguf SmolLM2-135M-Instruct.Q4_1.gguf --cache ~/.cache/graphspec-peers \\
        --bundle "graphspec int8=BUNDLE" --widths 0,2,4 --json peers.json --markdown peers.md

The peers are installed from the package index, each into an environment of its own under --cache, and the model is
converted for those that read no GGUF; both once. Linux only.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path

from contenders import Contender, ours, peers
from environments import UnavailableError
from machine import pin
from perplexity import Text, chat, perplexities, texts
from processes import ContenderError, Worker
from report import Entrant, by_category, goals, notes, row, table
from rounds import Asked, Measured, Plan, measure

from graphspec.checkpoints import open_checkpoint
from graphspec.runtime.bench.about import about_machine
from graphspec.runtime.bench.prompts import in_turn, read_prompts
from graphspec.runtime.text import Tokenizer

Start = Callable[..., Worker]


def main(argv: Sequence[str] | None = None) -> int:
    """Exit status 1 if nobody could be measured."""
    args = _arguments(argv)
    tokenizer = Tokenizer(open_checkpoint(args.gguf).tokenizer_files())
    asked = prompts(tokenizer, args.category, args.num_prompts)
    scored = [] if args.no_perplexity else texts(tokenizer)
    plan = Plan(
        asked=asked,
        rounds=args.rounds,
        max_new_tokens=args.max_new_tokens,
        eos=tokenizer.eos_token_ids,
        cores=args.cores,
        pause=args.pause,
    )
    longest = (
        max(len(ids) for ids in [*(each.ids for each in asked), *(each.ids for each in scored)]) + args.max_new_tokens
    )
    starts, missing = prepared(chosen(args), args, longest)
    if args.prepare_only:
        print(*(f"{name}: {why}" for name, why in missing.items()), sep="\n")
        return 0
    pin(args.cores)
    scores, unscored = score_all(starts, scored)
    measured = measure({name: partial(start, score=False) for name, (_, start) in starts.items()}, plan, _say)
    entrants = [
        Entrant(
            name=name,
            ours=contender.ours,
            speculates=contender.speculates,
            result=measured.results[name],
            perplexity=scores.get(contender.scores_as or name, {}),
        )
        for name, (contender, _) in starts.items()
    ]
    others_share = measured.others_share(plan.cores)
    remarks = [f"{name} is missing: {why}" for name, why in missing.items()]
    remarks += [f"{name} has no perplexity: {why}" for name, why in unscored.items()]
    remarks += notes(entrants, others_share)
    text = markdown(entrants, plan, remarks)
    print(text)
    if args.markdown:
        args.markdown.write_text(text + "\n", encoding="utf-8")
    if args.json:
        args.json.write_text(json.dumps(as_json(entrants, measured, tokenizer, remarks), indent=2) + "\n")
    return 0 if any(row(each) for each in entrants) else 1


def prompts(tokenizer: Tokenizer, categories: Sequence[str], count: int) -> list[Asked]:
    """The first `count` of bench's own, of all categories (or those named) alike."""
    found = in_turn(read_prompts("builtin"), categories)[:count]
    return [
        Asked(each.id, each.category, tuple(tokenizer.encode(chat(tokenizer, each.text), add_special_tokens=False)))
        for each in found
    ]


def chosen(args: argparse.Namespace) -> list[Contender]:
    """Peers and bundles that --only lets in."""
    everybody = [*peers(), *(each for name, bundle in args.bundle for each in ours(name, bundle, args.widths))]
    found = [each for each in everybody if not args.only or any(part in each.name for part in args.only)]
    if not found:
        raise SystemExit(f"--only {args.only[0]}: nobody has that in the name; there are: {_names(everybody)}")
    return found


def prepared(
    everybody: Sequence[Contender], args: argparse.Namespace, max_length: int
) -> tuple[dict[str, tuple[Contender, Start]], dict[str, str]]:
    """What starts each of them, and why the others cannot be had."""
    threads = len(args.cores)
    starts: dict[str, tuple[Contender, Start]] = {}
    missing: dict[str, str] = {}

    def start(contender: Contender, *, score: bool) -> Worker:
        command = contender.command(args.cache, args.gguf, threads=threads, max_length=max_length, score=score)
        log = args.cache / "logs" / f"{contender.name.replace(' ', '-').replace(',', '')}.log"
        return Worker(command, log, threads=threads, timeout=args.timeout, own_path=contender.ours)

    for each in everybody:
        try:
            each.command(args.cache, args.gguf, threads=threads, max_length=max_length)
        except UnavailableError as error:
            missing[each.name] = str(error)
        else:
            starts[each.name] = each, partial(start, each)
    return starts, missing


def score_all(
    starts: Mapping[str, tuple[Contender, Start]], scored: Sequence[Text]
) -> tuple[dict[str, Mapping[str, float]], dict[str, str]]:
    """Perplexities of those that have weights of their own, one process after the other, and why some have none."""
    scores: dict[str, Mapping[str, float]] = {}
    unscored: dict[str, str] = {}
    for name, (contender, start) in starts.items():
        if not scored or contender.scores_as in starts:
            continue
        _say(f"perplexity of {name}")
        try:
            with start(score=True) as worker:
                worker.about()
                scores[contender.scores_as or name] = perplexities(worker, scored)
        except ContenderError as error:
            unscored[name] = str(error)
    return scores, unscored


def markdown(entrants: Sequence[Entrant], plan: Plan, remarks: Sequence[str]) -> str:
    """The report."""
    about = about_machine()
    categories = list(dict.fromkeys(each.category for each in plan.asked))
    settings = (
        f"{len(plan.asked)} prompts ({', '.join(categories)}), {plan.max_new_tokens} new tokens at most, greedy, "
        f"{plan.rounds} rounds (median, least-most), cores {', '.join(map(str, sorted(plan.cores)))}"
    )
    parts = [f"{about['machine']}; {about['software']}. {settings}.", table(entrants)]
    if len(categories) > 1:
        parts.append(by_category(entrants))
    parts.append("\n".join(f"- {line}" for line in goals(entrants)))
    versions = [f"- {each.name}: {', '.join(each.result.about.values())}" for each in entrants if each.result.about]
    parts += ["\n".join(versions), "\n".join(f"- {line}" for line in remarks)]
    return "\n\n".join(part for part in parts if part)


def as_json(
    entrants: Sequence[Entrant], measured: Measured, tokenizer: Tokenizer, remarks: Sequence[str]
) -> dict[str, object]:
    """Everything, each answer's text too."""
    found = {}
    for each in entrants:
        entry = asdict(each)
        for sample in entry["result"]["samples"]:
            sample["text"] = tokenizer.decode(sample["tokens"])
        figures = row(each)
        found[each.name] = entry | {"figures": asdict(figures) if figures else None}
    about = {**about_machine(), "others_seconds": measured.others_seconds, "seconds": measured.seconds}
    return {"about": about, "contenders": found, "goals": goals(entrants), "remarks": list(remarks)}


def _names(everybody: Sequence[Contender]) -> str:
    return "; ".join(each.name for each in everybody)


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def _arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gguf", type=Path, required=True, help="the model")
    parser.add_argument("--cache", type=Path, required=True, help="a folder for environments and converted models")
    parser.add_argument("--bundle", type=_bundle, action="append", default=[], metavar="NAME=PATH", help="repeatable")
    parser.add_argument("--widths", type=_widths, default=["0"], metavar="2,auto", help="of every bundle, beside 0")
    parser.add_argument("--only", action="append", default=[], metavar="TEXT", help="contenders with it in the name")
    parser.add_argument(
        "--category", action="append", default=[], metavar="NAME", help="of bench's prompts; repeatable"
    )
    parser.add_argument("--num-prompts", type=int, default=24, metavar="N")
    parser.add_argument("--max-new-tokens", type=int, default=200, metavar="N")
    parser.add_argument("--rounds", type=int, default=3, metavar="N")
    parser.add_argument("--cores", type=_cores, default="0,1", metavar="0,1", help="as many threads as these")
    parser.add_argument("--pause", type=float, default=0.2, metavar="S", help="before each request")
    parser.add_argument("--timeout", type=float, default=300.0, metavar="S", help="of one request, or of loading")
    parser.add_argument("--no-perplexity", action="store_true")
    parser.add_argument("--prepare-only", action="store_true", help="install and convert, measure nothing")
    parser.add_argument("--json", type=Path, metavar="F")
    parser.add_argument("--markdown", type=Path, metavar="F")
    args = parser.parse_args(argv)
    for name in ("num_prompts", "max_new_tokens", "rounds"):
        if getattr(args, name) < 1:
            parser.error(f"--{name.replace('_', '-')} must be at least 1")
    args.cache = args.cache.expanduser().resolve()
    args.gguf = args.gguf.expanduser().resolve()
    return args


def _bundle(text: str) -> tuple[str, Path]:
    name, _, path = text.partition("=")
    if not name or not Path(path).is_dir():
        raise argparse.ArgumentTypeError(f"{text!r} is not NAME=PATH of a bundle")
    return name, Path(path).resolve()


def _widths(text: str) -> list[str]:
    words = text.split(",")
    if not all(word.isdecimal() or word == "auto" for word in words):
        raise argparse.ArgumentTypeError(f"{text!r}: give whole numbers with commas, or auto")
    return list(dict.fromkeys(words))


def _cores(text: str) -> frozenset[int]:
    words = text.split(",")
    if not all(word.isdecimal() for word in words):
        raise argparse.ArgumentTypeError(f"{text!r}: give numbers of cores with commas")
    return frozenset(map(int, words))


if __name__ == "__main__":
    raise SystemExit(main())
