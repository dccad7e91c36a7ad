"""`timebell observe`: what comes with the package for Prometheus and Grafana."""

from __future__ import annotations

from timebell.cli import click_signatures
from timebell.cli.output import show

observe = click_signatures.Group("What comes along for Prometheus and Grafana.")


@observe.command()
def rules() -> None:
    """Print the alert rules for Prometheus: timebell observe rules > rules.yml."""
    show(_file("rules.yml"))


@observe.command()
def grafana() -> None:
    """Print the dashboard for Grafana, to import: timebell observe grafana > timebell.json."""
    show(_file("grafana.json"))


def _file(name: str) -> str:
    from importlib.resources import files

    return files("timebell.observe").joinpath(name).read_text(encoding="utf-8").rstrip("\n")
