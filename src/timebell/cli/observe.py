"""`timebell observe`: print the packaged files for Prometheus and Grafana."""

from __future__ import annotations

from timebell.cli.groups import Group
from timebell.cli.output import print_data

observe = Group("Files for Prometheus and Grafana.")


@observe.command()
def rules() -> None:
    """Print the alert rules for Prometheus: timebell observe rules > rules.yml."""
    print_data(_read_packaged_file("rules.yml"))


@observe.command()
def grafana() -> None:
    """Print the dashboard to import into Grafana: timebell observe grafana > timebell.json."""
    print_data(_read_packaged_file("grafana.json"))


def _read_packaged_file(name: str) -> str:
    from importlib.resources import files

    return files("timebell.observe").joinpath(name).read_text(encoding="utf-8").rstrip("\n")
