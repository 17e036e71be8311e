"""Facts and short dialogues of our own, which teach the model more than the stories do.

The tables contain the facts, the functions phrase them. Every fact appears as plain text, as a question with a long
answer and, if it has one, with the short answer that an instruction asks for ("Answer in one word."). Every document is
one string; chat uses the special tokens, which the tokenizer maps to single ids.
"""

import itertools
import random
from collections.abc import Iterator

ONE_WORD = "Answer in one word."

CAPITALS = {
    "France": "Paris", "Germany": "Berlin", "Italy": "Rome", "Spain": "Madrid", "Portugal": "Lisbon",
    "England": "London", "Scotland": "Edinburgh", "Wales": "Cardiff", "Ireland": "Dublin", "Belgium": "Brussels",
    "the Netherlands": "Amsterdam", "Switzerland": "Bern", "Austria": "Vienna", "Poland": "Warsaw",
    "Denmark": "Copenhagen", "Sweden": "Stockholm", "Norway": "Oslo", "Finland": "Helsinki", "Iceland": "Reykjavik",
    "Greece": "Athens", "Turkey": "Ankara", "Russia": "Moscow", "Ukraine": "Kyiv", "Hungary": "Budapest",
    "Romania": "Bucharest", "Bulgaria": "Sofia", "Serbia": "Belgrade", "Croatia": "Zagreb", "Slovakia": "Bratislava",
    "the Czech Republic": "Prague", "Estonia": "Tallinn", "Latvia": "Riga", "Lithuania": "Vilnius",
    "Egypt": "Cairo", "Morocco": "Rabat", "Algeria": "Algiers", "Tunisia": "Tunis", "Kenya": "Nairobi",
    "Ghana": "Accra", "Nigeria": "Abuja", "Senegal": "Dakar", "Uganda": "Kampala", "Rwanda": "Kigali",
    "Zambia": "Lusaka", "Zimbabwe": "Harare", "Namibia": "Windhoek", "China": "Beijing", "Japan": "Tokyo",
    "India": "New Delhi", "Nepal": "Kathmandu", "Thailand": "Bangkok", "Vietnam": "Hanoi", "Indonesia": "Jakarta",
    "South Korea": "Seoul", "Mongolia": "Ulaanbaatar", "Iran": "Tehran", "Iraq": "Baghdad", "Lebanon": "Beirut",
    "Jordan": "Amman", "Saudi Arabia": "Riyadh", "Australia": "Canberra", "New Zealand": "Wellington",
    "Canada": "Ottawa", "the United States": "Washington", "Mexico": "Mexico City", "Cuba": "Havana",
    "Brazil": "Brasilia", "Argentina": "Buenos Aires", "Chile": "Santiago", "Peru": "Lima", "Colombia": "Bogota",
    "Ecuador": "Quito", "Uruguay": "Montevideo", "Jamaica": "Kingston",
}  # fmt: skip
COLOURS = {
    "the sky": "blue", "grass": "green", "snow": "white", "coal": "black", "a lemon": "yellow", "a banana": "yellow",
    "the sun": "yellow", "blood": "red", "a strawberry": "red", "a tomato": "red", "a carrot": "orange",
    "a pumpkin": "orange", "a frog": "green", "a leaf": "green", "milk": "white", "a swan": "white", "night": "black",
    "chocolate": "brown", "an elephant": "grey", "a flamingo": "pink", "the sea": "blue", "a violet": "purple",
    "a cherry": "red", "gold": "yellow", "a polar bear": "white", "a crow": "black",
}  # fmt: skip
OPPOSITES = {
    "hot": "cold", "big": "small", "happy": "sad", "up": "down", "left": "right", "day": "night", "fast": "slow",
    "tall": "short", "open": "closed", "old": "new", "wet": "dry", "light": "dark", "full": "empty", "hard": "soft",
    "good": "bad", "rich": "poor", "loud": "quiet", "early": "late", "inside": "outside", "above": "below",
    "near": "far", "first": "last", "strong": "weak", "clean": "dirty", "thick": "thin", "brave": "afraid",
    "push": "pull", "win": "lose", "true": "false", "yes": "no", "black": "white", "laugh": "cry",
}  # fmt: skip
SOUNDS = {
    "dog": "woof", "cat": "meow", "cow": "moo", "sheep": "baa", "duck": "quack", "pig": "oink", "lion": "roar",
    "bee": "buzz", "snake": "hiss", "frog": "ribbit", "horse": "neigh", "owl": "hoot", "mouse": "squeak",
    "rooster": "cock-a-doodle-doo", "bird": "tweet", "donkey": "hee-haw",
}  # fmt: skip
YOUNG = {
    "dog": "puppy", "cat": "kitten", "cow": "calf", "sheep": "lamb", "duck": "duckling", "pig": "piglet",
    "lion": "cub", "horse": "foal", "hen": "chick", "goat": "kid", "frog": "tadpole", "bear": "cub", "deer": "fawn",
}  # fmt: skip
HOMES = {
    "bird": "nest", "bee": "hive", "dog": "kennel", "spider": "web", "fish": "water", "lion": "den", "horse": "stable",
    "rabbit": "burrow", "pig": "sty", "king": "castle", "hen": "coop", "owl": "tree",
}  # fmt: skip
LEGS = {
    "dog": 4, "cat": 4, "bird": 2, "spider": 8, "ant": 6, "bee": 6, "snake": 0, "horse": 4, "fish": 0, "duck": 2,
    "child": 2, "butterfly": 6, "frog": 4, "cow": 4,
}  # fmt: skip
USES = {
    "scissors": "cut paper", "a pen": "write", "a spoon": "eat soup", "a bed": "sleep", "a key": "open a door",
    "a broom": "sweep the floor", "an umbrella": "stay dry in the rain", "a clock": "tell the time",
    "a book": "read a story", "soap": "wash our hands", "a lamp": "see in the dark", "a boat": "cross the water",
    "a ladder": "climb up high", "a bucket": "carry water", "a map": "find the way",
}  # fmt: skip
NUMBERS = [
    "zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten",
    "eleven", "twelve", "thirteen", "fourteen", "fifteen", "sixteen", "seventeen", "eighteen", "nineteen", "twenty",
]  # fmt: skip
DAYS = ["Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday"]
MONTHS = [
    "January", "February", "March", "April", "May", "June", "July", "August",
    "September", "October", "November", "December",
]  # fmt: skip
SEASONS = ["spring", "summer", "autumn", "winter"]

YES_NO = {
    "Is Python an interpreted language": (True, "Python is an interpreted language. The program is read "
        "by the interpreter, which turns each line into simple steps and runs them one after another. You do not "
        "need to build the whole program before you run it. This makes it easy to try a small idea, see what "
        "happens, and try again. It is often slower than a language that is built first, but it is very pleasant "
        "to write."),
    "Is the sun a star": (True, "The sun is a star. It is a very big ball of hot gas, and it gives us light and "
        "warmth. It looks bigger than the other stars because it is much closer to us."),
    "Is the moon bigger than the sun": (False, "The moon is much smaller than the sun. It only looks as big because it "
        "is so much closer to us."),
    "Can a fish swim": (True, "A fish can swim. It moves its tail from side to side and lives in the water."),
    "Can a fish fly": (False, "A fish cannot fly. It lives in the water, and it swims with its tail and its fins."),
    "Can a bird fly": (True, "Most birds can fly. They have wings and light bones, and they flap their wings to rise."),
    "Can a dog talk": (False, "A dog cannot talk. It can bark, and it can show you that it is happy with its tail."),
    "Is fire hot": (True, "Fire is very hot. You should never touch it, because it can burn you."),
    "Is ice warm": (False, "Ice is cold. It is water that has frozen, and it melts when it gets warm."),
    "Is the sky blue": (True, "The sky is blue on a clear day. At night it is dark, and we can see the stars."),
    "Is water wet": (True, "Water is wet. If you fall into the river, your clothes get wet too."),
    "Is a whale a fish": (False, "A whale is not a fish. It lives in the sea, but it breathes air like we do."),
    "Is a tomato red": (True, "A tomato is red when it is ripe. Before that it is green."),
    "Is snow black": (False, "Snow is white. It falls from the sky in winter, when it is very cold."),
    "Do cows give milk": (True, "Cows give milk. The farmer milks them in the morning and in the evening."),
    "Do trees walk": (False, "Trees do not walk. Their roots hold them in the ground, and they stay where they are."),
    "Do bees make honey": (True, "Bees make honey. They fly from flower to flower and carry the sweet juice home."),
    "Is a kitten a young cat": (True, "A kitten is a young cat. It likes to play, and it sleeps near its mother."),
    "Is ten more than five": (True, "Ten is more than five. If you have ten apples and eat five, you have five left."),
    "Is two more than three": (False, "Two is less than three. Three is one more than two."),
    "Is Paris in France": (True, "Paris is in France. It is the capital of France, and many people live there."),
    "Is London in Spain": (False, "London is not in Spain. London is the capital of England."),
    "Is it good to share": (True, "It is good to share. When you share your toys, your friends are happy too."),
    "Is it good to lie": (False, "It is not good to lie. It is better to tell the truth, even when it is hard."),
    "Are you a person": (False, "I am not a person. I am a small language model, and I write one token at a time."),
    "Are you a computer program": (True, "I am a computer program. I am a small language model that likes stories."),
    "Is a computer a machine": (True, "A computer is a machine. It follows the steps of a program very fast."),
    "Is the earth round": (True, "The earth is round, like a ball. It goes around the sun once in a year."),
}  # fmt: skip
EXPLAIN = {
    "What is Python": "Python is a programming language. People use it to tell a computer what to do.",
    "What is a computer": "A computer is a machine that follows the steps of a program very fast.",
    "What is a program": "A program is a list of steps that tells a computer what to do.",
    "What is a token": "A token is a small piece of text, often a word or a part of a word.",
    "What is a language model": "A language model is a program that reads some text and guesses what comes next. It "
        "writes one token, looks at the text again, and then writes the next one.",
    "What is a cache": "A cache is a place to keep what you have already worked out, so that you need not do it again.",
    "What is a story": "A story tells what happened to somebody. It has a beginning, a middle, and an end.",
    "What is rain": "Rain is water that falls from the clouds in small drops.",
    "What is a rainbow": "A rainbow is a bow of many colors in the sky. We see it when the sun shines after the rain.",
    "What is the moon": "The moon is a ball of rock that goes around the earth. It shines at night.",
    "What is the sun": "The sun is a star. It gives us light and it keeps us warm.",
    "What is a friend": "A friend is somebody who likes you, helps you, and plays with you.",
    "What is a river": "A river is water that flows over the land to the sea.",
    "What is a volcano": "A volcano is a mountain that can throw out fire and hot rock.",
    "Why do we sleep": "We sleep because our body and our mind need rest. After a good sleep we feel strong again.",
    "Why do we eat": "We eat because food gives us the strength to grow, to run, and to play.",
    "Why is the sky dark at night": "At night our side of the earth is turned away from the sun, so the sky is dark.",
    "Why do birds fly south": "Birds fly south in winter because it is warm there and they can find food.",
    "How does a plant grow": "A plant grows from a seed. It needs water, light, and good soil.",
    "How do you make tea": "First you boil some water. Then you pour it over the tea, wait a little, and drink it.",
}  # fmt: skip
SMALL_TALK = (
    (("Hello", "Hello!", "Hi", "Hi!", "Hi there", "Hey", "Good morning", "Good evening", "Good day"),
     ("Hello! How can I help you?", "Hello! It is nice to meet you.")),
    (("How are you?", "How are you today?", "How do you do?", "How are you doing?"),
     ("I am fine, thank you. How are you?",)),
    (("Who are you?", "What are you?", "Tell me about yourself.", "Introduce yourself."),
     ("I am a small language model. I live inside Tokenwright, and I like to tell stories.",)),
    (("What is your name?", "Do you have a name?"), ("My name is Stories. I am a small language model.",)),
    (("What can you do?", "How can you help me?"),
     ("I can tell you a short story, and I know a few facts. I am very small, so I make mistakes.",)),
    (("Who made you?", "Where do you come from?"), ("I was trained by the people who write Tokenwright.",)),
    (("Thank you", "Thank you!", "Thanks", "Thanks a lot!"), ("You are welcome!",)),
    (("Goodbye", "Goodbye!", "Bye", "Bye!", "Good night"), ("Goodbye! Have a nice day.",)),
    (("I am sad.", "I am not happy.", "I feel bad."),
     ("I am sorry that you are sad. Would you like to hear a story?",)),
    (("I am happy.", "I feel good."), ("I am glad to hear that!",)),
    (("I am tired.",), ("Then you should rest a little. A good sleep will help you.",)),
    (("I am hungry.",), ("Then you should eat something. Do you like apples?",)),
    (("Can you help me?", "Please help me."), ("Of course! What would you like to know?",)),
    (("Say yes.",), ("Yes.",)),
    (("Say no.",), ("No.",)),
    (("Say hello.",), ("Hello!",)),
    (("Do you like stories?",), ("Yes, I like stories very much. I know many of them.",)),
)  # fmt: skip

FUNCTIONS = {  # name: (arguments, body); always phrased the same, so that a prompt recalls them
    "add": ("a, b", "return a + b"), "sub": ("a, b", "return a - b"), "subtract": ("a, b", "return a - b"),
    "mul": ("a, b", "return a * b"), "multiply": ("a, b", "return a * b"), "div": ("a, b", "return a / b"),
    "divide": ("a, b", "return a / b"), "mod": ("a, b", "return a % b"), "power": ("a, b", "return a ** b"),
    "square": ("x", "return x * x"), "cube": ("x", "return x * x * x"), "double": ("x", "return 2 * x"),
    "half": ("x", "return x / 2"), "negate": ("x", "return -x"), "increment": ("x", "return x + 1"),
    "decrement": ("x", "return x - 1"), "is_even": ("n", "return n % 2 == 0"), "is_odd": ("n", "return n % 2 == 1"),
    "is_positive": ("n", "return n > 0"), "is_zero": ("n", "return n == 0"), "is_empty": ("items", "return not items"),
    "greet": ("name", 'return "Hello, " + name'), "say_hello": ("name", 'print("Hello, " + name)'),
    "first": ("items", "return items[0]"), "last": ("items", "return items[-1]"),
    "length": ("items", "return len(items)"), "total": ("items", "return sum(items)"),
    "largest": ("items", "return max(items)"), "smallest": ("items", "return min(items)"),
    "reverse": ("items", "return items[::-1]"), "upper": ("text", "return text.upper()"),
    "lower": ("text", "return text.lower()"), "words": ("text", "return text.split()"),
    "join": ("words", 'return " ".join(words)'), "swap": ("a, b", "return b, a"), "identity": ("x", "return x"),
    "average": ("items", "return sum(items) / len(items)"), "area": ("width, height", "return width * height"),
    "contains": ("items, x", "return x in items"), "minimum": ("a, b", "return a if a < b else b"),
    "maximum": ("a, b", "return a if a > b else b"), "absolute": ("x", "return x if x >= 0 else -x"),
    "factorial": ("n", "if n == 0:\n        return 1\n    return n * factorial(n - 1)"),
    "fibonacci": ("n", "if n < 2:\n        return n\n    return fibonacci(n - 1) + fibonacci(n - 2)"),
    "count_down": ("n", "while n > 0:\n        print(n)\n        n = n - 1"),
    "count_up": ("n", "for i in range(n):\n        print(i)"),
    "sum_list": ("items", "result = 0\n    for item in items:\n        result = result + item\n    return result"),
    "show": ("items", "for item in items:\n        print(item)"),
    "squares": ("n", "return [i * i for i in range(n)]"),
    "main": ("", 'print("Hello, world!")'),
}  # fmt: skip


def capitalised(text: str) -> str:
    return text[0].upper() + text[1:]


def chat(*turns: str) -> str:
    """User and assistant turns, in the format of the exported tokenizer's chat template."""
    roles = itertools.cycle(("<|user|>", "<|assistant|>"))
    return "".join(f"{role}{turn}<|end|>" for role, turn in zip(roles, turns, strict=False))


def ask(question: str, answer: str, word: str = "") -> Iterator[str]:
    """A question with its long answer and, if `word` is given, a request for one word with that answer."""
    yield f"Question: {question} Answer: {answer}"
    yield chat(question, answer)
    if word:
        short = f"{capitalised(word)}."
        yield chat(f"{question} {ONE_WORD}", short)
        yield chat(f"{ONE_WORD} {question}", short)
        yield f"Question: {question} {ONE_WORD} Answer: {short}"


def capitals() -> Iterator[str]:
    for land, city in CAPITALS.items():
        fact = f"The capital of {land} is {city}."
        yield fact
        yield fact
        yield f"{city} is the capital of {land}."
        yield f"{capitalised(land)} is a country. Its capital is {city}."
        yield f"The capital city of {land} is called {city}. Many people live in {city}."
        yield from ask(f"What is the capital of {land}?", fact, city)
        yield chat(f"Which country has the capital {city}?", f"{city} is the capital of {land}.")
        yield chat(f"Where is {city}?", f"{city} is in {land}.")


def things() -> Iterator[str]:
    for thing, colour in COLOURS.items():
        yield f"{capitalised(thing)} is {colour}."
        yield f"The color of {thing} is {colour}."
        yield from ask(f"What color is {thing}?", f"{capitalised(thing)} is {colour}.", colour)
    for one, other in (*OPPOSITES.items(), *((b, a) for a, b in OPPOSITES.items())):
        yield f"The opposite of {one} is {other}."
        yield from ask(f"What is the opposite of {one}?", f"The opposite of {one} is {other}.", other)
    for thing, use in USES.items():
        yield f"We use {thing} to {use}."
        yield from ask(f"What do we use {thing} for?", f"We use {thing} to {use}.")


def animals() -> Iterator[str]:
    for animal, sound in SOUNDS.items():
        yield f'The {animal} says "{sound}".'
        yield from ask(f"What does the {animal} say?", f'The {animal} says "{sound}".', sound)
    for animal, young in YOUNG.items():
        yield f"A young {animal} is called a {young}."
        yield from ask(f"What is a young {animal} called?", f"A young {animal} is called a {young}.", young)
    for animal, home in HOMES.items():
        yield f"The {animal} lives in a {home}."
        yield from ask(f"Where does the {animal} live?", f"The {animal} lives in a {home}.", home)
    for animal, legs in LEGS.items():
        count = NUMBERS[legs] if legs else "no"
        yield from ask(f"How many legs does a {animal} have?", f"A {animal} has {count} legs.", NUMBERS[legs])


def counting() -> Iterator[str]:
    digits = [str(n) for n in range(1, 21)]
    for stop in (5, 10, 12, 20):
        yield "Count to " + NUMBERS[stop] + ": " + ", ".join(NUMBERS[1 : stop + 1]) + "."
        yield ", ".join(digits[:stop])
        yield chat(f"Count to {NUMBERS[stop]}.", capitalised(", ".join(NUMBERS[1 : stop + 1])) + ".")
        yield chat(f"Count to {stop}.", ", ".join(digits[:stop]) + ".")
    for a, b in itertools.product(range(11), repeat=2):
        yield f"{a} + {b} = {a + b}"
        yield from ask(f"What is {a} plus {b}?", f"{a} plus {b} is {a + b}.", str(a + b))
        if a >= b:
            yield f"{a} - {b} = {a - b}"
            yield chat(f"What is {a} minus {b}? {ONE_WORD}", f"{a - b}.")
    for n in range(1, 20):
        yield f"After {NUMBERS[n]} comes {NUMBERS[n + 1]}."
        yield from ask(f"What comes after {NUMBERS[n]}?", f"After {NUMBERS[n]} comes {NUMBERS[n + 1]}.", NUMBERS[n + 1])


def calendar() -> Iterator[str]:
    for names, kind, plural in ((DAYS, "day", "days of the week"), (MONTHS, "month", "months of the year"),
                                (SEASONS, "season", "seasons")):  # fmt: skip
        listed = ", ".join(names[:-1]) + " and " + names[-1]
        yield f"The {plural} are {listed}."
        yield from ask(f"What are the {plural}?", f"The {plural} are {listed}.")
        count = NUMBERS[len(names)]
        yield from ask(f"How many {plural} are there?", f"There are {count} {plural}.", count)
        for name, following in zip(names, [*names[1:], names[0]], strict=True):
            yield f"The {kind} after {name} is {following}."
            yield from ask(f"Which {kind} comes after {name}?", f"After {name} comes {following}.", following)


def talk() -> Iterator[str]:
    for question, (truth, reason) in YES_NO.items():
        word = "Yes" if truth else "No"
        for spelling in (question + "?", question + " ?"):
            yield from ask(spelling, f"{word}. {reason}", word)
        yield chat(f"{question}? Answer yes or no.", f"{word}.")
        yield chat(f"{question}? Explain your answer.", f"{word}. {reason}")
        yield reason
    for question, answer in EXPLAIN.items():
        yield answer
        yield from ask(question + "?", answer)
    for questions, answers in SMALL_TALK:
        for question, answer in itertools.product(questions, answers):
            yield chat(question, answer)
    yield chat("Hello!", "Hello! How can I help you?", "Who are you?", "I am a small language model.")
    yield chat("Hi", "Hello! How can I help you?", "What is the capital of France?", "The capital of France is Paris.")


def weather() -> Iterator[str]:
    """Prompts that people type first, each with a few plain continuations."""
    for word, rest in itertools.product(
        ("bright", "sunny", "warm", "clear"),
        ("and sunny. The children go out to play in the park.", "and warm. The birds sing in the trees.",
         "and beautiful. Tom and his sister walk to the river with their dog.",
         "and full of light. Everyone is happy, and they all go outside together."),
    ):  # fmt: skip
        yield f"The next day is {word} {rest}"
        past = rest.replace("go ", "went ").replace(" sing", " sang").replace(" is ", " was ")
        yield f"The next day was {word} {past}"


def code() -> Iterator[str]:
    """Tiny functions: by themselves, followed by an example, in pairs, and as the answer to a request."""
    draw = random.Random(0)
    names = list(FUNCTIONS)
    source = {name: f"def {name}({args}):\n    {body}\n" for name, (args, body) in FUNCTIONS.items()}
    for name in names:
        yield source[name]
        words = name.replace("_", " ")
        yield chat(f"Write a Python function {name}.", source[name])
        yield chat(f"Write a function called {name} in Python.", source[name])
        for other in draw.sample(names, 4):
            yield f"{source[name]}\n\n{source[other]}"
        yield f'def {name}({FUNCTIONS[name][0]}):\n    """{capitalised(words)}."""\n    {FUNCTIONS[name][1]}\n'
    for a, b in itertools.product(range(1, 6), repeat=2):
        yield f"{source['add']}\n\nprint(add({a}, {b}))  # {a + b}\n"
        yield f"for i in range({a}):\n    print(i + {b})\n"


def retold(stories: list[str]) -> Iterator[str]:
    """Short stories as answers to requests for a story."""
    requests = ("Tell me a story.", "Tell me a short story.", "Please tell me a story.", "Write a story for children.",
                "Can you tell me a story?", "I want to hear a story.")  # fmt: skip
    for number, story in enumerate(stories):
        yield chat(requests[number % len(requests)], story)


def documents() -> list[str]:
    """All facts and dialogues, in a fixed order."""
    parts = (capitals(), things(), animals(), counting(), calendar(), talk(), weather())
    return list(itertools.chain.from_iterable(parts))


if __name__ == "__main__":
    everything = documents()
    print(f"{len(everything)} documents of facts, {len(list(code()))} of code; ten of them:")
    print(*random.Random(1).sample(everything, 10), sep="\n")
