"""The schema of scenarios.py as a model, for libraries that take one."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict


class Weather(BaseModel):
    """Arguments of a forecast: a city, and a number of days."""

    model_config = ConfigDict(extra="forbid")

    city: Literal["Oslo", "Paris"]
    days: Literal[1, 2, 3]
