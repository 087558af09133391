"""The parts of a router that the engine protocol's calls go through."""

from __future__ import annotations

from dataclasses import dataclass

from router.api.operator_commands import AdapterCommands
from router.api.request_telemetry import RequestTelemetry
from router.catalog.models import Models
from router.dispatch.dispatcher import Dispatcher
from router.generation.encoding import Encoding
from router.generation.generation import Generation
from router.text.prompt_encoder import PromptEncoder


@dataclass(frozen=True)
class Intake:
    """The parts of a router that requests go through, whatever protocol they come by."""

    models: Models
    telemetry: RequestTelemetry
    generation: Generation
    encoding: Encoding
    dispatcher: Dispatcher
    commands: AdapterCommands
    encoder: PromptEncoder
