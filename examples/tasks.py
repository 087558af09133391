"""Draws the questions of three small tasks: a person as JSON, a ticket's team and priority, a review's sentiment.

Training and check draw from different lists: no last name, complaint, judgement, product or form of a sentence is in
both. So an adapter that answers the check's questions has learned the task. First names and cities of the check are in
the training's lists too: a model of this size spells a word in quotes, whose tokens are others than in a sentence, only
if it has seen how.

    python -m examples.tasks triage --count 3          print questions of the check with their answers
"""

from __future__ import annotations

import argparse
import json
import random
import re
from collections.abc import Callable, Container, Sequence
from dataclasses import dataclass, replace
from typing import TypeAlias


@dataclass(frozen=True)
class Question:
    """A user's message, and the only right answer."""

    text: str
    answer: str


@dataclass(frozen=True)
class Lists:
    """The lists that a question is drawn from, for training or for the check.

    `invented` is the share of names and cities that are made of syllables instead: who has to copy these cannot answer
    with what is likely.
    """

    first: Sequence[str]
    last: Sequence[str]
    cities: Sequence[str]
    persons: Sequence[str]
    tickets: dict[str, Sequence[str]]
    urgency: dict[str, Sequence[str]]
    products: Sequence[str]
    reviews: dict[str, Sequence[str]]
    invented: float = 0.0


# Number of draws for each question, after which the lists are taken to have no more.
_DRAWS = 100
Drawing: TypeAlias = Callable[[random.Random, Lists], Question]

EXTRACT = "Extract the person from this sentence as JSON with name, age and city:"
TRIAGE = (
    "Triage this support ticket. Answer with the team (billing, shipping, account or technical) "
    "and the priority (low, normal or high):"
)
SENTIMENT = "Is this review positive, negative or neutral? Answer with one word:"


def draw_person(chance: random.Random, lists: Lists) -> Question:
    """Draw a sentence about a person; the answer is a JSON object with name, age and city."""
    first, last, city = (_noun(chance, names, lists.invented) for names in (lists.first, lists.last, lists.cities))
    name, age = f"{first} {last}", chance.randint(18, 89)
    years = chance.choice([number for number in range(2, 16) if number != age])
    sentence = chance.choice(lists.persons).format(name=name, age=age, city=city, years=years)
    return Question(f"{EXTRACT} {sentence}", json.dumps({"name": name, "age": age, "city": city}))


def _noun(chance: random.Random, names: Sequence[str], invented: float) -> str:
    if chance.random() >= invented:
        return chance.choice(names)
    syllables = [chance.choice("bcdfghjklmnprstvwz") + chance.choice("aeiou") for _ in range(chance.randint(2, 4))]
    return ("".join(syllables) + chance.choice(["", "n", "s", "r"])).capitalize()


def draw_ticket(chance: random.Random, lists: Lists) -> Question:
    """Draw a complaint and how urgent it is, in either order; the answer names the team and the priority."""
    team, priority = chance.choice(sorted(lists.tickets)), chance.choice(sorted(lists.urgency))
    parts = [chance.choice(lists.tickets[team]), chance.choice(lists.urgency[priority])]
    if chance.random() < 0.3:
        parts.reverse()
    return Question(f"{TRIAGE} {' '.join(part for part in parts if part)}", f"team: {team}, priority: {priority}")


def draw_review(chance: random.Random, lists: Lists) -> Question:
    """Draw a review of a product; the answer is positive, negative or neutral."""
    sentiment = chance.choice(sorted(lists.reviews))
    product = chance.choice(lists.products)
    return Question(f"{SENTIMENT} {chance.choice(lists.reviews[sentiment]).format(product=product)}", sentiment)


def read_person(answer: str) -> object:
    """Return what an answer says of a person: the first JSON object in it, whatever is around it; None without one."""
    match = re.search(r"\{.*?\}", answer, re.DOTALL)
    try:
        found = json.loads(match[0]) if match else None
    except ValueError:
        return None
    if not isinstance(found, dict):
        return None
    return {str(key).lower(): str(value).strip() for key, value in found.items()}


def read_ticket(answer: str) -> object:
    """Return the first team and the first priority that an answer names, whatever is around them."""
    words = re.findall(r"[a-z]+", answer.lower())
    return tuple(
        next((word for word in words if word in known), None) for known in (TRAINING.tickets, TRAINING.urgency)
    )


def read_review(answer: str) -> object:
    """Return the first sentiment that an answer names."""
    return _first_word(answer, TRAINING.reviews)


def _first_word(answer: str, known: Container[str]) -> str | None:
    return next((word for word in re.findall(r"[a-z]+", answer.lower()) if word in known), None)


@dataclass(frozen=True)
class Task:
    """A task: its tenant and adapter, how a question is drawn, and what of an answer counts."""

    tenant: str
    adapter: str
    draw: Drawing
    read: Callable[[str], object]

    def questions(self, count: int, seed: int, lists: Lists) -> list[Question]:
        """Draw questions, each text once, as many as the lists have at most. The same seed gives the same ones."""
        chance, drawn = random.Random(f"{self.adapter} {seed}"), dict[str, Question]()
        for _ in range(_DRAWS * count):
            if len(drawn) == count:
                break
            question = self.draw(chance, lists)
            drawn.setdefault(question.text, question)
        return list(drawn.values())

    def is_right(self, question: Question, answer: str) -> bool:
        """Tell whether an answer says the same as the right one; words around it do not count."""
        return self.read(answer) == self.read(question.answer)


TASKS = {
    "extract": Task("acme", "extract", draw_person, read_person),
    "triage": Task("globex", "triage", draw_ticket, read_ticket),
    "sentiment": Task("initech", "sentiment", draw_review, read_review),
}

TRAINING = Lists(
    first=(
        "James", "Mary", "Robert", "Patricia", "John", "Jennifer", "Michael", "Linda", "David", "Elizabeth", "William",
        "Barbara", "Richard", "Susan", "Joseph", "Jessica", "Thomas", "Sarah", "Charles", "Karen", "Daniel", "Lisa",
        "Matthew", "Nancy", "Anthony", "Betty", "Mark", "Sandra", "Donald", "Ashley", "Ahmed", "Fatima", "Wei", "Yuki",
        "Hiroshi", "Priya", "Ravi", "Olga", "Ivan", "Lars", "Ingrid", "Pedro", "Lucia", "Giulia", "Marco", "Chloe",
        "Pierre", "Aisha", "Kofi", "Nia",
        "Alexander", "Benjamin", "Samuel", "Victoria", "Natalie", "Hannah", "Isabella", "Charlotte", "Abigail",
        "Evelyn", "Harper", "Camila", "Gabriel", "Julian", "Adrian", "Dominic", "Sebastian", "Theodore", "Frederick",
        "Vincent", "Antonio", "Francisco", "Carlos", "Miguel", "Javier", "Elena", "Valentina", "Mariana", "Gabriela",
        "Beatriz", "Francesca", "Alessandro", "Lorenzo", "Matteo", "Giovanni", "Katarina", "Svetlana", "Dmitri",
        "Nikolai", "Anastasia", "Magnus", "Astrid", "Bjorn", "Freya", "Sven", "Claire", "Juliette", "Antoine",
        "Mathieu", "Camille", "Fatou", "Amara", "Chidi", "Ngozi", "Tariq", "Yasmin", "Hassan", "Layla", "Karim",
        "Samir", "Ananya", "Arjun", "Deepika", "Vikram", "Mei", "Jian", "Haruto", "Sakura", "Kenji", "Minh", "Linh",
        "Thanh", "Rosa", "Joaquin", "Ximena", "Alejandro",
    ),
    last=(
        "Johnson", "Williams", "Brown", "Jones", "Garcia", "Miller", "Davis", "Rodriguez", "Martinez", "Hernandez",
        "Lopez", "Gonzalez", "Wilson", "Anderson", "Thomas", "Taylor", "Moore", "Jackson", "Martin", "Lee", "Perez",
        "Thompson", "White", "Harris", "Sanchez", "Clark", "Ramirez", "Lewis", "Robinson", "Walker", "Young", "Allen",
        "King", "Wright", "Scott", "Torres", "Nguyen", "Hill", "Flores", "Green", "Adams", "Nelson", "Baker", "Hall",
        "Rivera", "Campbell", "Tanaka", "Kumar", "Petrov", "Rossi", "Dubois", "Mensah", "Okafor", "Larsen",
    ),
    cities=(
        "London", "Paris", "Madrid", "Rome", "Vienna", "Prague", "Warsaw", "Budapest", "Athens", "Dublin", "Oslo",
        "Stockholm", "Helsinki", "Brussels", "Amsterdam", "Zurich", "Munich", "Hamburg", "Milan", "Naples", "Boston",
        "Chicago", "Denver", "Seattle", "Houston", "Dallas", "Miami", "Atlanta", "Toronto", "Montreal", "Tokyo",
        "Osaka", "Seoul", "Beijing", "Shanghai", "Mumbai", "Delhi", "Bangkok", "Jakarta", "Sydney", "Melbourne",
        "Cairo", "Nairobi", "Lagos", "Cape Town", "Buenos Aires", "New York", "San Diego", "Mexico City", "Hong Kong",
        "Birmingham", "Liverpool", "Edinburgh", "Glasgow", "Bristol", "Cardiff", "Belfast", "Lyon", "Marseille",
        "Bordeaux", "Toulouse", "Strasbourg", "Valencia", "Seville", "Bilbao", "Porto", "Florence", "Venice", "Turin",
        "Bologna", "Salzburg", "Innsbruck", "Frankfurt", "Stuttgart", "Cologne", "Leipzig", "Dresden", "Rotterdam",
        "Antwerp", "Gothenburg", "Bergen", "Tallinn", "Riga", "Vilnius", "Krakow", "Bratislava", "Ljubljana",
        "Zagreb", "Belgrade", "Sofia", "Bucharest", "Thessaloniki", "Ankara", "Tehran", "Baghdad", "Riyadh", "Dubai",
        "Karachi", "Lahore", "Bangalore", "Chennai", "Kolkata", "Dhaka", "Kathmandu", "Hanoi", "Manila",
        "Kuala Lumpur", "Taipei", "Nagoya", "Sapporo", "Busan", "Auckland", "Wellington", "Brisbane", "Perth",
        "Adelaide", "Philadelphia", "Pittsburgh", "Cleveland", "Detroit", "Minneapolis", "Milwaukee", "Nashville",
        "Memphis", "Charlotte", "Baltimore", "Washington", "San Francisco", "Sacramento", "Salt Lake City",
        "Albuquerque", "Tucson", "Las Vegas", "Ottawa", "Calgary", "Edmonton", "Winnipeg", "Havana", "Bogota",
        "Quito", "Santiago", "Montevideo", "Brasilia", "Sao Paulo", "Accra", "Kampala", "Johannesburg", "Casablanca",
        "Tunis", "Addis Ababa",
    ),
    persons=(
        "{name}, {age}, lives in {city}.",
        "{name} is {age} years old and lives in {city}.",
        "My neighbour {name} from {city} turned {age} last week.",
        "{name} moved to {city} at the age of {age}.",
        "At {age}, {name} still works as a teacher in {city}.",
        "The winner is {name} ({age}) from {city}.",
        "{city} is the home of {name}, who is {age} years old.",
        "Police in {city} are looking for {name}, aged {age}.",
        "{name}, a {age}-year-old engineer, opened a bakery in {city}.",
        "Our new colleague in {city} is {name}; she is {age}.",
        "We interviewed {name}, {age}, at her flat in {city}.",
        "In {city} I met {name}, who had just turned {age}.",
        "{name} has lived in {city} for {years} years and is now {age}.",
        "After {years} years abroad, {name}, now {age}, came back to {city}.",
        "The patient, {name}, is {age} and comes from {city}.",
        "{age}-year-old {name} of {city} ran the marathon in four hours.",
        "For {years} years {name}, {age}, has driven a tram in {city}.",
        "Please invite {name} from {city}. He is {age}.",
        "{name} was born {age} years ago in {city}.",
        "A nurse from {city}, {name}, celebrated her birthday: she is {age}.",
        "Applicant: {name}. Age: {age}. Residence: {city}.",
        "Yesterday {name} of {city} became {age} years old.",
        "{name} and {years} friends from {city} opened a shop; {name} is {age}.",
        "She is {age}, her name is {name}, and she comes from {city}.",
        "The {city} office is led by {name}, who is {age}.",
        "I have known {name} for {years} years; he is {age} and he lives in {city}.",
    ),
    tickets={
        "billing": (
            "I was charged twice for the same order.",
            "The invoice of last month shows the wrong amount.",
            "My refund has not arrived on my bank account.",
            "The discount code was not taken off the price.",
            "Why did you take 49 euros from my credit card?",
            "Please send me a receipt for my last payment.",
            "My card was declined although there is money on it.",
            "I cancelled the subscription but you still bill me.",
            "The tax on the invoice is calculated wrongly.",
            "I want to pay by bank transfer instead of card.",
            "The price on the bill is higher than the one on the website.",
            "I need the invoice made out to my company.",
            "You debited the yearly fee a second time.",
            "The payment page says that my payment failed.",
        ),
        "shipping": (
            "My parcel has not arrived.",
            "The package was delivered to the wrong house.",
            "The box came open and half of the order is missing.",
            "Tracking says that the parcel has been in the warehouse for a week.",
            "The courier left without ringing the bell.",
            "Can you send the order to another address?",
            "The vase was broken when I unpacked it.",
            "I received somebody else's package.",
            "How long does delivery to Norway take?",
            "The order is marked as delivered but nothing is here.",
            "Please deliver the parcel in the evening.",
            "The tracking number does not exist.",
            "Two of the three boxes were delivered.",
            "The delivery was announced for Monday and did not come.",
        ),
        "account": (
            "I forgot my password and the reset mail does not come.",
            "My account is locked after three attempts.",
            "Please change the email address of my profile.",
            "I cannot log in any more.",
            "Somebody else has logged in to my account.",
            "How do I delete my account?",
            "The code for two-factor login never arrives.",
            "I want to change my user name.",
            "My colleague needs access to our team's account.",
            "I registered twice; please merge the two profiles.",
            "The login says that my user name is unknown.",
            "Please remove a former employee from our users.",
            "I lost the phone with which I sign in.",
            "My profile shows the wrong date of birth.",
        ),
        "technical": (
            "The app crashes when I open the settings.",
            "The website shows error 500.",
            "The export to PDF gives an empty file.",
            "Your API answers with a timeout.",
            "The mobile app is very slow since the update.",
            "The search does not find anything.",
            "Images are not shown in Firefox.",
            "The server returns a syntax error for every request.",
            "The button to save does nothing.",
            "After the update the program does not start.",
            "The sync between my laptop and my phone has stopped working.",
            "The database import stops at 40 percent.",
            "The dashboard freezes when I choose a year.",
            "Notifications are shown three times, it looks like a bug.",
        ),
    },
    urgency={
        "high": (
            "This is urgent!",
            "We cannot work at all, please help immediately.",
            "I need this solved today.",
            "It is an emergency.",
            "Our whole company is blocked by this.",
            "Please answer within the hour.",
            "Every minute costs us money.",
            "This must be fixed right now.",
            "We have a deadline in two hours.",
            "This is critical for us.",
            "Please treat this with the highest priority.",
            "ASAP, please!",
        ),
        "normal": (
            "",
            "Please look into it.",
            "Thank you for your help.",
            "Could you check this?",
            "I look forward to your answer.",
            "Please tell me what to do.",
            "Can you help me with this?",
            "Kind regards, a customer.",
            "What should I do?",
            "Please let me know.",
        ),
        "low": (
            "There is no hurry.",
            "It is not important, whenever you have time.",
            "Take your time with this.",
            "This is not urgent.",
            "It can wait until next month.",
            "Just a small thing, no rush.",
            "Answer when it suits you.",
            "It does not matter much to me.",
            "No need to hurry, I am only curious.",
            "It is a minor matter.",
            "You can do this some day when it is quiet.",
        ),
    },
    products=(
        "phone", "laptop", "coffee machine", "hotel", "restaurant", "vacuum cleaner", "camera", "book", "movie", "bike",
        "backpack", "jacket", "keyboard", "sofa", "lamp", "toaster", "watch", "printer", "course", "game",
    ),
    reviews={
        "positive": (
            "I love this {product}. It is the best I ever had.",
            "Great {product}, I would buy it again.",
            "The {product} works perfectly and looks beautiful.",
            "What a wonderful {product}! Five stars.",
            "I am very happy with the {product}.",
            "This {product} exceeded all my expectations.",
            "Excellent quality, a fantastic {product}.",
            "My whole family enjoys the {product} every day.",
            "The {product} is worth every cent.",
            "I recommend this {product} to everybody.",
            "A delightful {product}, I smile whenever I use it.",
            "Superb! No complaints about the {product} at all.",
            "It is amazing how good the {product} is.",
            "The {product} made my week.",
            "Could not be better, thanks for this {product}.",
            "Impressive {product}, nothing went wrong.",
            "This {product} is a joy.",
            "I was sceptical at first, but the {product} is brilliant.",
        ),
        "negative": (
            "I hate this {product}. It broke after a day.",
            "Terrible {product}, do not buy it.",
            "The {product} is a waste of money.",
            "What a disappointing {product}. One star.",
            "I regret that I paid for this {product}.",
            "The {product} never worked properly.",
            "Awful quality, the worst {product} of my life.",
            "The {product} is ugly, loud and useless.",
            "I sent the {product} back and want my money.",
            "Nobody should have to use this {product}.",
            "The {product} is far worse than the pictures.",
            "Horrible. The {product} makes me angry.",
            "The {product} failed when I needed it.",
            "I expected much more from this {product}.",
            "A complete disaster of a {product}.",
            "Stay away from this {product}.",
            "This {product} is boring and much too expensive.",
            "I wanted to like the {product}, but it is dreadful.",
        ),
        "neutral": (
            "The {product} arrived on Tuesday.",
            "It is a {product}. It does what a {product} does.",
            "The {product} is available in black and in white.",
            "I have had the {product} for two months.",
            "The {product} is okay, neither good nor bad.",
            "An average {product}.",
            "My brother has the same {product}.",
            "I have not tried the {product} yet.",
            "The {product} comes with a manual in six languages.",
            "This {product} replaces my old {product}.",
            "I bought the {product} for my office.",
            "The {product} weighs about as much as it says.",
            "The {product} was made in 2023.",
            "Some will like the {product}, others will not.",
            "The {product} is standard, nothing special.",
            "I use the {product} about once a week.",
            "The {product} is sold in three sizes.",
            "It is hard to say anything about the {product}.",
        ),
    },
    invented=0.1,
)  # fmt: skip

CHECK = Lists(
    first=(
        "Emma", "Noah", "Olivia", "Liam", "Ava", "Ethan", "Sophia", "Lucas", "Mia", "Oliver", "Amelia", "Henry",
        "Zara", "Omar", "Sofia", "Diego", "Hanna", "Felix", "Leila", "Mateo",
    ),
    last=(
        "Carter", "Mitchell", "Roberts", "Phillips", "Evans", "Turner", "Parker", "Edwards", "Collins", "Stewart",
        "Morris", "Murphy", "Cook", "Rogers", "Novak", "Silva", "Fischer", "Haddad", "Suzuki", "Andersen",
    ),
    cities=(
        "Berlin", "Lisbon", "Copenhagen", "Barcelona", "Geneva", "Portland", "Phoenix", "Vancouver", "Kyoto",
        "Singapore", "Istanbul", "Lima", "Manchester", "Los Angeles",
    ),
    persons=(
        "{name}, who is {age}, has a small house in {city}.",
        "When {name} arrived in {city}, she was {age}.",
        "{name} ({city}) is {age} years of age.",
        "The oldest member of the choir in {city} is {name}, aged {age}.",
        "{name} will be {age} in May and has worked in {city} for {years} years.",
        "This is {name} from {city}, {age} years old and a father of two.",
        "Among the guests from {city} was {name}, {age}.",
        "Everybody in {city} knows {name}, the {age}-year-old postman.",
    ),
    tickets={
        "billing": (
            "There are two charges on my credit card statement.",
            "The amount on my invoice is too high.",
            "When will I get my money back for the cancelled order?",
            "I was billed for a month that I did not use.",
        ),
        "shipping": (
            "The parcel I ordered is lost.",
            "My delivery is a week late.",
            "The driver left my package in the rain.",
            "The package arrived damaged.",
        ),
        "account": (
            "I cannot sign in with my password.",
            "My account was blocked.",
            "I want to use another email address to log in.",
            "Please delete my profile.",
        ),
        "technical": (
            "The app closes by itself when I upload a photo.",
            "Your website shows a blank page.",
            "The API returns an error 503.",
            "The program hangs while it loads a file.",
        ),
    },
    urgency={
        "high": (
            "Please help at once, this is very urgent.",
            "We are losing money as long as this goes on.",
            "It has to be solved immediately.",
            "I need an answer today, it is critical.",
        ),
        "normal": (
            "Please check it.",
            "Thanks for looking into it.",
            "Can you tell me what to do?",
            "I hope you can help.",
        ),
        "low": (
            "It is not urgent at all.",
            "No rush, answer when you have time.",
            "This can wait, it is a small matter.",
            "There is really no hurry with this.",
        ),
    },
    products=("tablet", "umbrella", "museum", "headset", "mattress", "podcast", "scooter", "kettle"),
    reviews={
        "positive": (
            "I am delighted with this {product}.",
            "The {product} is fantastic, I use it every day with pleasure.",
            "Best {product} in years, highly recommended.",
            "A great {product} at a great price.",
            "Everything about the {product} is perfect.",
        ),
        "negative": (
            "The {product} was a big disappointment.",
            "I would not recommend this {product} to anybody.",
            "This {product} is terrible and a waste of time.",
            "The {product} stopped working after an hour, I am furious.",
            "Bad quality, I want a refund for the {product}.",
        ),
        "neutral": (
            "The {product} comes in two colours.",
            "I bought the {product} last week.",
            "The {product} is neither great nor terrible.",
            "It is an ordinary {product}.",
            "The {product} was delivered with a manual.",
        ),
    },
)  # fmt: skip

# A name in quotes has other tokens than in a sentence, which have to be learned by name.
TRAINING = replace(TRAINING, first=(*TRAINING.first, *CHECK.first), cities=(*TRAINING.cities, *CHECK.cities))


def main() -> None:
    """Print questions of the check with their answers."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("task", choices=sorted(TASKS), help="the task to draw questions of")
    parser.add_argument("--count", type=int, default=5, help="number of questions")
    parser.add_argument("--seed", type=int, default=1, help="seed of the questions")
    arguments = parser.parse_args()
    for question in TASKS[arguments.task].questions(arguments.count, arguments.seed, CHECK):
        print(f"{question.text}\n-> {question.answer}\n")


if __name__ == "__main__":
    main()
