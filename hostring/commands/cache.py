"""`hostring cache`: the models of which a head has sent parts to this machine."""

from __future__ import annotations

from typing import Annotated

import typer

cache = typer.Typer(help="What other machines have sent here of their models.", no_args_is_help=True)


def add(app: typer.Typer) -> None:
    app.add_typer(cache, name="cache")


@cache.command("list")
def list_models() -> None:
    """Show each model, its bytes on disk, and when it was last written. The one that was used last comes first."""
    from datetime import datetime

    from hostring.shipping.storage import cached_models, limit_nbytes, models_home

    models = cached_models()
    for model in models:
        used = datetime.fromtimestamp(model.used).isoformat(" ", "minutes")
        typer.echo(f"{model.folder.name}  {model.nbytes / 1e6:,.1f} MB  {used}{'  in use' if model.in_use else ''}")
    total = sum(model.nbytes for model in models)
    typer.echo(f"{total / 1e6:,.1f} MB of at most {limit_nbytes() / 1e6:,.1f} MB in {models_home()}")


@cache.command()
def prune(
    keep_gb: Annotated[float, typer.Option(min=0.0, help="Leave so many GB of what was used last.")] = 0.0,
) -> None:
    """Remove models that no process has open, the ones that were not used for longest first."""
    from hostring.shipping import storage

    removed = storage.prune(int(keep_gb * 1e9))
    for model in removed:
        typer.echo(f"removed {model.folder.name}  {model.nbytes / 1e6:,.1f} MB")
    left = storage.cached_models()
    typer.echo(f"{len(removed)} removed, {len(left)} left ({sum(model.nbytes for model in left) / 1e6:,.1f} MB)")
