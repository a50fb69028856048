"""The commands ``ferrodist ckpt ...``.

Handlers import modules that need torch when they run, since the launcher starts without torch.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ferrodist.installation import how_to_install
from ferrodist.launch.terminal import print_warning, write_stdout
from ferrodist.wording import counted

if TYPE_CHECKING:
    import argparse
    from collections.abc import Callable, Iterator

    from ferrodist.checkpoint.tools.rewrite import RewriteOptions

    Progress = Callable[[int, int], None]


_FORMATS = ("ferrodist", "dcp", "torch", "hf")
_SIZE_OPTIONS = (
    ("ranks", "num_ranks", 1, 0),
    ("max_file_mib", "max_file_bytes", 1, 20),
    ("max_memory_mib", "max_memory_bytes", 16, 20),
)
"""Options, their names in `RewriteOptions`, their minimums, and the shifts from their units."""


def add_ckpt_arguments(parser: argparse.ArgumentParser) -> list[argparse.ArgumentParser]:
    """Declare the commands of ``ferrodist ckpt``; return their parsers."""
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    inspect = _add(commands, "inspect", _inspect, "show what is in a checkpoint", "PATH")
    verify = _add(commands, "verify", _verify, "read all of a checkpoint and check it", "PATH")
    diff = _add(commands, "diff", _diff, "show where two checkpoints differ", "A", "B")
    reshard = _add(commands, "reshard", _reshard, "write a checkpoint for another number of ranks", "A", "B")
    convert = _add(commands, "convert", _convert, "convert from and to checkpoints of others", "A", "B")
    for each in (inspect, verify, diff):
        each.add_argument("--json", action="store_true", help="print JSON")
    reshard.add_argument("--ranks", type=int, required=True, metavar="N", help="the number of ranks to write for")
    reshard.add_argument("--no-verify", action="store_true", help="don't check hashes")
    convert.add_argument("--from", dest="source", choices=_FORMATS, required=True, help="what A is")
    convert.add_argument("--to", dest="target", choices=_FORMATS, required=True, help="what B becomes")
    convert.add_argument("--part", metavar="KEYS", help="to hf: only this part of the state, as 'model'")
    convert.add_argument(
        "--ranks", type=int, metavar="N", help="to ferrodist: the number of ranks to write for (default 1)"
    )
    for each in (reshard, convert):
        each.add_argument(
            "--dim", type=int, metavar="D", help="shard tensors along this dim (default: chosen for each)"
        )
        each.add_argument("--max-file-mib", type=int, metavar="N", help="split longer files (default 4768)")
        each.add_argument("--max-memory-mib", type=int, metavar="N", help="for tensors in memory (default 256)")
    return [inspect, verify, diff, reshard, convert]


def _add(
    commands: Any, name: str, run: Callable[[argparse.Namespace], int], text: str, *paths: str
) -> argparse.ArgumentParser:
    sentence = f"{text[0].upper()}{text[1:]}."
    parser: argparse.ArgumentParser = commands.add_parser(name, help=text, description=sentence, allow_abbrev=False)
    for metavar, path in zip(paths, ("path", "other"), strict=False):
        parser.add_argument(path, metavar=metavar, help="a folder, or a URL as s3://bucket/folder")
    parser.add_argument(
        "--storage-option",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help="for the file system of URLs; the value is JSON, or text",
    )
    parser.set_defaults(run=run)
    return parser


def run_ckpt(arguments: argparse.Namespace) -> int:
    """Run one of the commands; return 1 if a checkpoint is damaged or two differ, else 0."""
    code: int = arguments.run(arguments)
    return code


def _inspect(arguments: argparse.Namespace) -> int:
    if not arguments.json and not _has_rich():
        print_warning(
            f"ferrodist: the table needs rich, which is not installed here: {how_to_install('ckpt')}; or give --json\n"
        )
        return 1
    from ferrodist.checkpoint.tools.inspect import inspect_checkpoint  # noqa: PLC0415 - needs torch

    found = inspect_checkpoint(arguments.path, storage_options=_options(arguments, arguments.path))
    if arguments.json:
        _print_json(found)
    else:
        from ferrodist.cli.checkpoint_display import render_inspection  # noqa: PLC0415 - needs the extra

        write_stdout(render_inspection(found))
    return 1 if found.problems else 0


def _verify(arguments: argparse.Namespace) -> int:
    from ferrodist.checkpoint.tools.verify import verify  # noqa: PLC0415 - needs torch

    options = _options(arguments, arguments.path)
    with _progress_bar("verify") as progress:
        report = verify(arguments.path, storage_options=options, progress=progress)
    if arguments.json:
        _print_json(report)
        return 0 if report.is_sound else 1
    for problem in report.problems:
        write_stdout(f"{problem}\n")
    size = _describe_size(report.num_tensors, report.num_files, report.size_bytes)
    count = counted(len(report.problems), "problem")
    write_stdout(f"{report.url}: sound, {size}\n" if report.is_sound else f"{report.url}: {count}, {size}\n")
    return 0 if report.is_sound else 1


def _diff(arguments: argparse.Namespace) -> int:
    from ferrodist.checkpoint.tools.diff import compare  # noqa: PLC0415 - needs torch

    with _progress_bar("compare") as progress:
        found = compare(
            arguments.path,
            arguments.other,
            storage_options=_options(arguments, arguments.path),
            other_storage_options=_options(arguments, arguments.other),
            progress=progress,
        )
    if arguments.json:
        _print_json(found)
    else:
        write_stdout("".join(f"{each}\n" for each in found))
    return 1 if found else 0


def _reshard(arguments: argparse.Namespace) -> int:
    from ferrodist.checkpoint.tools.reshard import reshard  # noqa: PLC0415 - needs torch

    with _progress_bar("reshard") as progress:
        options = _rewrite_options(arguments, progress)
        reshard(
            arguments.path,
            arguments.other,
            num_ranks=options.num_ranks,
            dim=options.dim,
            max_file_bytes=options.max_file_bytes,
            max_memory_bytes=options.max_memory_bytes,
            verify=not arguments.no_verify,
            storage_options=_options(arguments, arguments.path),
            new_storage_options=_options(arguments, arguments.other),
            progress=progress,
        )
    _print_written(arguments)
    return 0


def _convert(arguments: argparse.Namespace) -> int:
    source, target = arguments.source, arguments.target
    if (source == "ferrodist") == (target == "ferrodist"):
        raise ValueError("one of --from and --to must be ferrodist, and the other not")
    if arguments.part is not None and target != "hf":
        raise ValueError("--part is for --to hf")
    for option in ("ranks", "dim", "max_file_mib", "max_memory_mib"):
        takes = ("ferrodist", "hf") if option.startswith("max") else ("ferrodist",)
        if getattr(arguments, option) is not None and target not in takes:
            raise ValueError(f"--{option.replace('_', '-')} is for --to {' or '.join(takes)}")
    with _progress_bar("convert") as progress:
        if target == "ferrodist":
            _import(arguments, progress)
        else:
            _export(arguments, progress)
    if target in ("ferrodist", "hf"):
        _print_written(arguments)
    else:
        path = Path(arguments.other).absolute()
        files = [file.stat().st_size for file in (path.rglob("*") if path.is_dir() else [path]) if file.is_file()]
        write_stdout(f"{path}: written, {counted(len(files), 'file')}, {counted(sum(files), 'byte')}\n")
    return 0


def _import(arguments: argparse.Namespace, progress: Progress | None) -> None:
    from ferrodist.checkpoint import convert  # noqa: PLC0415 - needs torch

    options = _rewrite_options(arguments, progress)
    storages = {
        "storage_options": _options(arguments, arguments.path),
        "new_storage_options": _options(arguments, arguments.other),
    }
    if arguments.source == "torch":
        del storages["storage_options"]  # a file
        convert.import_torch_file(arguments.path, arguments.other, options=options, **storages)
    else:
        run = {"dcp": convert.import_dcp, "hf": convert.import_hugging_face}[arguments.source]
        run(arguments.path, arguments.other, options=options, **storages)


def _export(arguments: argparse.Namespace, progress: Progress | None) -> None:
    from ferrodist.checkpoint import convert  # noqa: PLC0415 - needs torch

    options = _options(arguments, arguments.path)
    if arguments.target == "hf":
        convert.export_hugging_face(
            arguments.path,
            arguments.other,
            part=arguments.part,
            options=_rewrite_options(arguments, progress),
            storage_options=options,
            new_storage_options=_options(arguments, arguments.other),
        )
    else:
        run = {"dcp": convert.export_dcp, "torch": convert.export_torch_file}[arguments.target]
        run(arguments.path, arguments.other, storage_options=options, progress=progress)


def _rewrite_options(arguments: argparse.Namespace, progress: Progress | None) -> RewriteOptions:
    """Return the options of reshard and convert for written files; ValueError names one that is out of range."""
    from ferrodist.checkpoint.tools.rewrite import RewriteOptions  # noqa: PLC0415 - needs torch

    given = {"dim": arguments.dim, "progress": progress}
    for option, field, minimum, shift in _SIZE_OPTIONS:
        value = getattr(arguments, option)
        if value is not None:
            if value < minimum:
                raise ValueError(f"--{option.replace('_', '-')} must be {minimum} or more, not {value}")
            given[field] = value << shift
    return RewriteOptions(**given)


def _options(arguments: argparse.Namespace, path: str) -> dict[str, Any] | None:
    """Return the options of a URL's file system; None for a local path."""
    found = {}
    for option in arguments.storage_option:
        key, equals, value = option.partition("=")
        if not key or not equals:
            raise ValueError(f"--storage-option must be KEY=VALUE, not {option!r}")
        try:
            found[key] = json.loads(value)
        except ValueError:
            found[key] = value
    return found if found and "://" in path else None


@contextlib.contextmanager
def _progress_bar(title: str) -> Iterator[Progress | None]:
    """Show a progress bar on a terminal, if rich is installed."""
    if not _has_rich():
        yield None
        return
    from ferrodist.cli.checkpoint_display import show_bar  # noqa: PLC0415 - needs the extra

    with show_bar(title) as progress:
        yield progress


def _has_rich() -> bool:
    return importlib.util.find_spec("rich") is not None


def _print_written(arguments: argparse.Namespace) -> None:
    """Describe the checkpoint that was just written."""
    from ferrodist.checkpoint.reader import read_manifest  # noqa: PLC0415 - needs torch
    from ferrodist.checkpoint.storage import open_storage  # noqa: PLC0415 - needs torch

    storage = open_storage(arguments.other, _options(arguments, arguments.other))
    manifest = read_manifest(storage)
    sizes = [file.size_bytes for file in manifest.files]
    write_stdout(f"{storage.url}: written, {_describe_size(len(manifest.tensors), len(sizes), sum(sizes))}\n")


def _describe_size(num_tensors: int, num_files: int, size_bytes: int) -> str:
    return f"{counted(num_tensors, 'tensor')} in {counted(num_files, 'file')}, {counted(size_bytes, 'byte')}"


def _print_json(value: Any) -> None:
    import msgspec  # noqa: PLC0415 - only for this

    def plain(found: object) -> str:
        return str(getattr(found, "value", found))

    write_stdout(msgspec.json.format(msgspec.json.encode(value, enc_hook=plain)).decode() + "\n")
