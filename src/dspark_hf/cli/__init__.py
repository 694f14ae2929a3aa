"""The `dspark` command: one thin file per verb."""

import sys

import typer

from .bench import bench
from .cache import cache
from .calibrate import calibrate
from .compare import compare
from .demo import demo
from .doctor import doctor
from .evaluate import evaluate
from .generate import generate
from .plot import plot
from .profile import profile
from .regenerate import regenerate
from .train import train

app = typer.Typer(no_args_is_help=True, pretty_exceptions_enable=False, help="DSpark speculative decoding.")
for verb in (calibrate, compare, demo, doctor, evaluate, generate, plot, profile, regenerate, train):
    app.command()(verb)
app.add_typer(bench, name="bench")
app.add_typer(cache, name="cache")


def main() -> None:
    """Runs the command; what a user can mend is said in one line."""
    try:
        app()
    except (ValueError, ImportError, OSError) as error:
        print(f"dspark: {error}", file=sys.stderr)
        sys.exit(2)
