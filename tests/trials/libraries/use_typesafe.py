"""TypeSafe's client: System One's questions, answered by a model or an adapter of the cluster."""

from __future__ import annotations

from typing import Any

from typesafe_sdk import Choice, ChoiceAnswer, Noul, Score, SystemOneResponse, TypeSafeBadRequestError, TypeSafeClient

from tests.trials.libraries.scenarios import KEY, MODEL, TOO_LONG, URL, check_refused, run

client = TypeSafeClient(api_key=KEY, base_url=URL, model=MODEL)
STATE = "I was charged twice for my order."
TEAMS = {"billing": "payments", "shipping": None}


def check_sum(probabilities: Any) -> None:
    assert abs(sum(probabilities.values()) - 1) < 1e-9, probabilities


def questions() -> None:
    """Ask a question of each kind at once, and each alone: the answers are the same."""
    asked: Any = {
        "money": Noul(instructions="It is about money."),
        "team": Choice(instructions="Which team?", criteria=TEAMS),
        "anger": Score(instructions="How angry?", criteria=["calm", "annoyed", "angry"]),
    }
    answer = client.system_one(state=STATE, questions=asked)
    assert 0 <= answer.nouls["money"].noul <= 1
    team, anger = answer.choices["team"], answer.scores["anger"]
    check_sum(team.probabilities)
    check_sum(anger.probabilities)
    assert team.choice == max(team.probabilities, key=team.probabilities.__getitem__)
    assert anger.legend == {0: "calm", 1: "annoyed", 2: "angry"}
    assert abs(anger.score - sum(level * share for level, share in anger.probabilities.items())) < 1e-9
    assert answer.usage.input_tokens
    for name, question in asked.items():
        alone = client.system_one(state=STATE, questions={name: question})
        assert alone.answers[name] == answer.answers[name], name


def content() -> None:
    """Ask about JSON, with criteria that are JSON, and without instructions."""
    asked: Any = {
        "late": {"type": "noul", "criteria": {"true": {"days": 9}, "false": None}},
        "team": {"type": "choice", "instructions": ["Which team?"], "criteria": {"billing": {"pays": True}, "x": None}},
        "anger": {"type": "score", "criteria": [{"mood": "calm"}, "angry"]},
    }
    answer = client.system_one(state={"order": 7, "notes": ["late"]}, questions=asked)
    assert set(answer.answers) == set(asked)
    assert answer.scores["anger"].legend[0] == {"mood": "calm"}


def schema() -> None:
    """Read the answers as fields of a class."""

    class Triage(SystemOneResponse):  # type: ignore[misc]  # installed where it is tried
        team: ChoiceAnswer

    answer = client.system_one(state=STATE, questions={"team": Choice(criteria=TEAMS)}, response_model=Triage)
    check_sum(answer.team.probabilities)


def overflow() -> None:
    """Get the error for a state that is too long."""
    asked: Any = {"money": Noul(instructions="It is about money.")}
    check_refused(lambda: client.system_one(state=TOO_LONG, questions=asked), TypeSafeBadRequestError)


if __name__ == "__main__":
    run(questions, content, schema, overflow)
