"""`moonshard verify-tools`: reads the files, asks a running server, and prints how it calls tools."""

import math
import sys
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import httpx
import tyro
from rich.console import Console

from moonshard.experiments.common.json_file import check_writable, write_json
from moonshard.experiments.verification.asking import CONNECT_S, Asking
from moonshard.experiments.verification.report import Verification, failures, footnotes, table, to_json
from moonshard.experiments.verification.results import Done, ResultFile, read_done
from moonshard.experiments.verification.running import Run, run
from moonshard.experiments.verification.samples import BrokenLine, Sample, prepared, read_reference, read_samples
from moonshard.experiments.verification.strict_json import parse
from moonshard.serving.commands.options import ApiKey, api_key_of, optional_argument
from moonshard.serving.commands.terminal_chat import authorization, root_of, served_models
from moonshard.serving.config.keys import ConfigError

FAILED = 1  # exit code
Lines = Sequence[Sample | BrokenLine]


def verify_tools(
    file: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="FILE")],
    url: Annotated[str, tyro.conf.arg(metavar="URL")],
    api_key: ApiKey = None,
    reference: Annotated[Path | None, optional_argument("RESULTS")] = None,
    model: Annotated[str | None, optional_argument("NAME")] = None,
    concurrency: int = 5,
    timeout: float = 600.0,
    extra_body: Annotated[str, tyro.conf.arg(metavar="JSON")] = "{}",
    out: Annotated[Path | None, optional_argument("RESULTS")] = None,
    json_file: Annotated[Path | None, tyro.conf.arg(name="json", metavar="FILE", help_behavior_hint="")] = None,
) -> int:
    """Ask a server what Kimi's vendor verifier asks: whether it calls tools when the reference does, and validly.

    Args:
        file: JSON lines in the verifier's format: requests (samples.jsonl), or results, which are their own reference.
        url: a running server's HTTP API.
        reference: results to compare with, by their data_index, rather than with those in the file.
        model: which model to ask; by default the request's own where the server lists it, else its only one.
        concurrency: requests under way at once, at least 1.
        timeout: seconds that a request may take.
        extra_body: put into each request, in the place of what it has there.
        out: where to append each result as it arrives. What has succeeded there is not asked again.
        json_file: where to write the summary.
    """
    _check_numbers(concurrency, timeout)
    asking = Asking(
        url=url,
        api_key=api_key_of(api_key),
        concurrency=concurrency,
        timeout_s=timeout,
        extra_body=read_extra_body(extra_body),
    )
    if json_file is not None:
        check_writable(json_file)
    lines = with_reference(_read_lines(file), reference)
    lines = with_models(lines, model, list_models(asking))
    done, results = open_results(out, asking.extra_body, {file, reference})
    ran = run_shown(lines, asking, done, results)
    verified = verification(url, lines, ran)
    show(verified)
    is_told = json_file is None or write_json(json_file, to_json(verified))
    is_kept = results is None or _says_kept(results)
    if ran.exit_code is not None:
        return ran.exit_code
    return 0 if is_told and is_kept and all(row.result.has_succeeded for row in ran.rows) else FAILED


def read_extra_body(text: str) -> Mapping[str, Any]:
    """ConfigError for what is no JSON object."""
    try:
        found = parse(text)
    except ValueError as error:
        raise ConfigError([f"--extra-body: not JSON: {error}"]) from error
    if not isinstance(found, dict):
        raise ConfigError([f"--extra-body {text}: expected a JSON object"])
    return found


def with_reference(lines: Lines, reference: Path | None) -> Lines:
    """The lines with the reference's finish reasons, where one is named. ConfigError where it has none."""
    if reference is None:
        return lines
    with _naming("--reference", reference):
        found = read_reference(reference)
    if not found:
        raise ConfigError([f"--reference {reference}: no result with a finish reason in it"])
    return [replace(line, reference=found.get(line.data_index)) if isinstance(line, Sample) else line for line in lines]


def list_models(asking: Asking) -> list[str]:
    """ConfigError where no server answers."""
    headers = authorization(asking.api_key)
    timeout = httpx.Timeout(asking.timeout_s, connect=CONNECT_S)
    with httpx.Client(base_url=root_of(asking.url), headers=headers, timeout=timeout, trust_env=False) as http:
        return served_models(http)


def with_models(lines: Lines, model: str | None, served: Sequence[str]) -> Lines:
    """The lines as they are asked, each of its model. ConfigError where that can be several."""
    return [
        replace(line, request=prepared(line.request, model or _model_of(line, served)))
        if isinstance(line, Sample)
        else line
        for line in lines
    ]


def _model_of(sample: Sample, served: Sequence[str]) -> str:
    own = sample.request.get("model")
    if isinstance(own, str) and own in served:
        return own
    if len(served) == 1:
        return served[0]
    listed = ", ".join(served)
    raise ConfigError([f"--model: the server lists {listed}, and request {sample.data_index} names none of them"])


def open_results(
    out: Path | None, extra_body: Mapping[str, Any], inputs: Collection[Path | None]
) -> tuple[Done, ResultFile | None]:
    """What an earlier run has done, and where to put what this one does. ConfigError where that cannot be."""
    if out is None:
        return Done(), None
    with _naming("--out", out):
        if any(path is not None and out.exists() and out.samefile(path) for path in inputs):
            raise ConfigError([f"--out {out}: it is read from, and cannot be written to"])
        return read_done(out, extra_body), ResultFile(out)


def run_shown(lines: Lines, asking: Asking, done: Done, results: ResultFile | None) -> Run:
    console = Console(stderr=True, highlight=False)
    with console.status("asking") as status:
        return run(
            lines,
            asking,
            done,
            keep=lambda result: None if results is None else results.append(result),
            progress=lambda num, total: status.update(f"{num} of {total} answered"),
        )


def verification(url: str, lines: Lines, ran: Run) -> Verification:
    asked = [line.request["model"] for line in lines if isinstance(line, Sample)]
    return Verification(
        url=url,
        models=list(dict.fromkeys(asked)),
        rows=ran.rows,
        num_kept=ran.num_kept,
        num_left=ran.num_left,
    )


def show(verified: Verification) -> None:
    console = Console(highlight=False, soft_wrap=True)
    console.print(table(verified))
    if (failed := failures(verified)) is not None:
        console.print(failed)
    for note in footnotes(verified):
        console.print(note, markup=False)


def _says_kept(results: ResultFile) -> bool:
    """Whether every result could be written; if not, it says so on stderr."""
    if results.error is not None:
        sys.stderr.write(f"moonshard: --out {results.path}: {results.error.strerror}\n")
    return results.error is None


def _check_numbers(concurrency: int, timeout: float) -> None:
    if concurrency < 1:
        raise ConfigError([f"--concurrency {concurrency}: at least 1"])
    if not 0 < timeout < math.inf:
        raise ConfigError([f"--timeout {timeout:g}: expected a number of seconds above 0"])


def _read_lines(file: Path) -> Lines:
    with _naming("FILE", file):
        lines = read_samples(file)
    if not lines:
        raise ConfigError([f"FILE {file}: no request in it"])
    return lines


@contextmanager
def _naming(option: str, path: Path) -> Iterator[None]:
    """Turns what the system says of a file into a ConfigError that names the option."""
    try:
        yield
    except OSError as error:
        raise ConfigError([f"{option} {path}: {error.strerror}"]) from error
