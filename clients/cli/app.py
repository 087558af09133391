"""The `loraplex` application with its commands."""

from __future__ import annotations

import os

import typer

from clients.cli import adapters, audit, certs, keys, models, plans, redis_users, tenants
from clients.cli.chat import chat
from clients.cli.cluster_top import top
from clients.cli.drain import drain
from clients.cli.gateway import gateway
from clients.cli.generate import generate
from clients.cli.jobs import jobs
from clients.cli.loadtest import loadtest
from clients.cli.options import (
    CA_VARIABLE,
    CERT_KEY_VARIABLE,
    CERT_VARIABLE,
    KEY_FILE_VARIABLE,
    ApiKeyFileOption,
    CaOption,
    CertOption,
    KeyOption,
)
from clients.cli.plan import plan
from clients.cli.quantize import quantize
from clients.cli.queues import queues
from clients.cli.score import score
from clients.cli.texts import classify, embed
from clients.cli.tokens import tokens
from clients.cli.up import up
from clients.cli.workers import workers

app = typer.Typer(
    name="loraplex",
    no_args_is_help=True,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
    help="One base language model, thousands of tenants' LoRA adapters, one cluster.\n\n"
    "[bold]loraplex up[/] starts a cluster on this machine; the other commands talk to one that runs.",
    epilog="Exit codes: 0 done; 2 bad input, or an address where nobody listens; 130 Ctrl-C; 1 anything else.",
)


@app.callback()
def credentials(
    api_key_file: ApiKeyFileOption = None, ca: CaOption = "", cert: CertOption = None, key: KeyOption = None
) -> None:
    """Leave the credentials where the SDK's clients look for them."""
    given = {KEY_FILE_VARIABLE: api_key_file, CA_VARIABLE: ca, CERT_VARIABLE: cert, CERT_KEY_VARIABLE: key}
    os.environ.update({name: str(value) for name, value in given.items() if value})


# The help page lists the commands in this order.
app.command()(up)
# Reads its own arguments, as the other processes of a cluster do.
app.command(
    context_settings={"ignore_unknown_options": True, "allow_extra_args": True, "help_option_names": []},
    add_help_option=False,
)(gateway)
app.command()(generate)
app.command()(chat)
app.command()(score)
app.command()(tokens)
app.command()(embed)
app.command()(classify)
app.add_typer(adapters.app, name="adapters")
app.add_typer(models.app, name="models")
app.add_typer(keys.app, name="keys")
app.add_typer(plans.app, name="plans")
app.add_typer(tenants.app, name="tenants")
app.add_typer(certs.app, name="certs")
app.add_typer(redis_users.app, name="redis")
app.add_typer(audit.app, name="audit")
app.command()(top)
app.command()(workers)
app.command()(queues)
app.command()(jobs)
app.command()(drain)
app.command()(plan)
app.command()(quantize)
app.command()(loadtest)
