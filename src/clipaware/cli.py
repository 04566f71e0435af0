"""The command line: ``clipaware perturb``, ``sweep``, ``measure``, ``replay``, ``explore``, ``env`` and ``demo``."""

from __future__ import annotations

import sys
import warnings

INTERRUPTED = 130  # as shells have it for Ctrl-C


def main(argv: list[str] | None = None) -> int:
    """Run a command line (by default, this process's) and return its exit code."""
    try:
        import typer
    except ImportError:
        return _failed("the command line needs Typer, which cannot be imported: pip install 'clipaware[cli]'")
    from clipaware._cli.app import app
    from clipaware._cli.work import CommandError
    from clipaware._media import FileError

    argv = sys.argv[1:] if argv is None else argv
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of libraries about files; what matters is in the one line about each
            code = app(argv or ["--help"], prog_name="clipaware", standalone_mode=False)
    except typer.TyperException as error:
        return _failed(f"{' '.join(error.format_message().split())} Try 'clipaware --help'.")
    except SystemExit as done:  # of what completes for a shell
        return int(done.code or 0)
    except (CommandError, FileError) as error:
        return _failed(str(error))
    except (KeyboardInterrupt, typer.Abort):  # if it came where Typer does not look for it
        code = INTERRUPTED
    if code == INTERRUPTED:
        print("clipaware: interrupted; what was written so far is whole, and --resume goes on", file=sys.stderr)
    return (code or 0) if argv else 2


def _failed(text: str) -> int:
    from clipaware._cli.show import error

    error(f"error: {text}")
    return 2


if __name__ == "__main__":
    raise SystemExit(main())
