"""A Flask application: views create jobs, handlers run in the application context; commands are `flask timebell ...`.

pip install "timebell[server]" flask
flask --app app timebell db upgrade
flask --app app run                                 # the web server: creates jobs
flask --app app timebell run                        # the engine, in a separate process: runs jobs
"""

from __future__ import annotations

from flask import Flask, current_app

from timebell import Arrived, Timebell
from timebell.integrations.flask import FlaskTimebell

bell = Timebell(timezone="UTC")
extension = FlaskTimebell(bell)


def create_app() -> Flask:
    web = Flask(__name__)
    web.config.update(TIMEBELL_APP="app:bell", SHOP="Tea and cups")
    extension.init_app(web)

    @web.post("/orders/<int:order>")
    def order(order: int) -> dict[str, str]:
        return {"job": bell.sync.schedule_at("orders.remind", payload={"order": order}).id}

    @web.get("/jobs/<job>")
    def job(job: str) -> dict[str, str | None]:
        status = bell.sync.get(job)
        return {"state": status.state, "result": status.result}

    return web


@bell.on("orders.remind")
def remind(event: Arrived) -> str:
    return f"{current_app.config['SHOP']}: order {event.payload['order']} waits for you."
