"""Prompts for heads of a general chat model, from templates: JSONL on the standard output.

    python assets/heads/prompts.py [COUNT] > prompts.jsonl

Eight kinds in turn: writing, roles, reasoning, maths, code, extraction, science, society. The same
count gives the same prompts, and the first ones of a larger count. All words are our own.
"""

import json
import random
import sys
from collections.abc import Iterator

WORDS: dict[str, list[str]] = {
    "animal": "cat,dog,elephant,owl,dolphin,fox,penguin,horse,bee,wolf,turtle,spider,whale,parrot,bear,ant,tiger,crow".split(","),
    "place": "Japan,Italy,Kenya,Iceland,Peru,Canada,Egypt,New Zealand,Norway,Mexico,India,Greece,Brazil,Scotland,Morocco,Vietnam,Hawaii,Paris,London,New York,Berlin,Lisbon".split(","),
    "job": "teacher,nurse,software engineer,baker,gardener,journalist,lawyer,pilot,architect,carpenter,doctor,chef,accountant,electrician,librarian,farmer,musician,scientist,salesperson,project manager".split(","),
    "thing": "a lighthouse,an old clock,a lost letter,a broken robot,a secret garden,a storm at sea,a talking tree,a forgotten village,a magic pencil,a journey by train,a birthday party,the last library on Earth,a rainy Sunday,a long winter,a new neighbour,an unexpected gift".split(","),
    "topic": "regular exercise,learning a second language,working from home,public transport,renewable energy,reading books,social media,early rising,healthy eating,saving money,artificial intelligence,space travel,recycling,teamwork,time management,sleep,meditation,online education,small businesses,electric cars".split(","),
    "science": "photosynthesis,gravity,black holes,DNA,evolution,the water cycle,plate tectonics,vaccines,the speed of light,atoms,magnetism,the immune system,climate change,electricity,quantum mechanics,the nervous system,volcanoes,the carbon cycle,antibiotics,osmosis,entropy,relativity,chemical bonds,photons,the solar system,digestion,earthquakes,bacteria,machine learning,neural networks,encryption,the Internet,batteries,nuclear fusion,enzymes".split(","),
    "society": "democracy,inflation,the Industrial Revolution,the Renaissance,supply and demand,the French Revolution,human rights,globalisation,the Roman Empire,the Cold War,the printing press,taxes,philosophy,Stoicism,utilitarianism,free trade,the Silk Road,ancient Greece,the Second World War,unemployment,interest rates,the United Nations,impressionism,jazz,Shakespeare,the stock market,urbanisation,migration,ethics,monopolies".split(","),
    "food": "pancakes,vegetable soup,chocolate cake,fried rice,lasagne,an omelette,apple pie,tomato sauce,a salad,bread,curry,tacos,banana bread,mashed potatoes,a smoothie".split(","),
    "person": "a pirate,a wise old monk,a strict teacher,a friendly shopkeeper,a detective,a time traveller,a famous chef,a medieval knight,a doctor,a career coach,a robot,a poet,a sports reporter,a museum guide,an astronaut,a grandmother".split(","),
    "name": "Anna,Ben,Carla,David,Emma,Felix,Grace,Hugo,Ines,James,Kira,Liam,Maria,Noah,Olivia,Peter,Rosa,Sam,Tina,Victor".split(","),
    "item": "apples,books,pencils,tickets,marbles,cookies,stamps,bottles,chairs,flowers,eggs,cards,shirts,toys,coins".split(","),
    "language": "Python,Python,Python,JavaScript,Java,C++,SQL,HTML,Bash".split(","),
    "task": "reverses a string,checks whether a number is prime,sorts a list of numbers,counts the words in a text,computes the factorial of a number,finds the largest number in a list,removes duplicates from a list,checks whether a word is a palindrome,computes the first n Fibonacci numbers,merges two sorted lists,reads a CSV file and prints its rows,computes the average of a list,converts Celsius to Fahrenheit,finds the most common word in a text,checks whether two strings are anagrams,searches a sorted list by bisection,counts vowels in a string,flattens a nested list,computes the greatest common divisor,generates a random password,validates an email address,finds the longest common prefix of strings,rotates a list by k places,implements a stack,implements a queue with two stacks,transposes a matrix,parses a date,groups words by their first letter".split(","),
    "concept": "recursion,a linked list,a hash table,a class,inheritance,a REST API,version control with Git,unit tests,a for loop,a dictionary,exceptions,multithreading,big O notation,a binary search tree,a database index,caching".split(","),
    "problem": "my laptop is slow,I cannot sleep at night,my plants are dying,I have a job interview tomorrow,I want to learn to play the guitar,my neighbour is too loud,I want to lose some weight,I procrastinate too much,I have to give a speech,I am new in town and want to make friends,my phone battery drains too fast,I need a present for my mother,I want to start a blog,I feel stressed at work".split(","),
    "colour": "red,blue,green,yellow,black,white,orange,purple".split(","),
    "product": "a new smartphone,a coffee machine,running shoes,a mystery novel,a budget hotel,a vacuum cleaner,an online course,a restaurant,a pair of headphones,a backpack".split(","),
    "company": "Northwind,Acme,Bluebird,Sunrise Foods,Delta Tools,Greenfield,Riverbank,Orchid Labs".split(","),
    "month": "January,February,March,April,May,June,July,August,September,October,November,December".split(","),
}  # fmt: skip

KINDS: tuple[tuple[str, ...], ...] = (
    (  # writing
        "Write a short story about {thing}.",
        "Write a short story about a {animal} and a {animal2} who become friends.",
        "Compose a travel blog post about a recent trip to {place}, with experiences and must-see places.",
        "Write an email to my manager asking for {number} days of leave in {month}.",
        "Write a formal email to {company} to ask about the price of {number} {item}.",
        "Write a poem about {thing}.",
        "Write a persuasive essay about the benefits of {topic}. Use less than 200 words.",
        "Write a product review of {product}.",
        "Describe {place} to someone who has never been there.",
        "Draft an introduction for a blog post about {topic}.",
        "Write a letter of recommendation for {name}, a {job}.",
        "Write a cover letter for a job as a {job}.",
        "Rewrite this sentence in three different ways: {name} likes {topic}.",
        "Write five headlines for an article about {topic}.",
        "Write a dialogue between {name} and {name2} about {topic}.",
        "Write a limerick about a {animal}.",
        "Summarise the advantages and disadvantages of {topic} in two paragraphs.",
        "Write a speech about {topic} for a school.",
    ),
    (  # roles
        "Pretend to be {person}. Introduce yourself and tell me about your day.",
        "You are {person}. Explain {science} to a visitor.",
        "Imagine you are {person} and give me advice, because {problem}.",
        "Act as a {job}. What are the first things you would ask a new client?",
        "Take the role of {person} and describe {place}.",
        "You are a {job}. How would you convince someone of {topic}?",
        "Suppose you are a {animal}. Describe your daily life.",
        "Please act as an English translator and improver. Correct my text: 'i has went to {place} last {month} and it were very good'.",
        "Hello! How are you today?",
        "What should I do? {problem_cap}.",
        "Can you help me? {problem_cap}.",
        "Interview {person} about {topic}. Write three questions and answers.",
        "Hi, I am {name}, a {job} from {place}. What could we talk about?",
    ),
    (  # reasoning
        "{name} is older than {name2}, and {name2} is older than {name3}. Who is the youngest?",
        "Compare a {animal} and a {animal2}. What do they have in common and how do they differ?",
        "Which is better for the environment, {topic} or {topic2}? Explain your reasoning.",
        "A {colour} box holds {number} {item} and a {colour2} box holds {number2}. Which holds more, and how many more?",
        "Which word does not belong: {animal}, {animal2}, {food}? Explain.",
        "If it takes {number} minutes to bake {food}, and I start at {hour} o'clock, when will it be ready?",
        "What would happen if there were no {item} in the world?",
        "What are the causes and effects of {topic}?",
        "Is it true that every {animal} can swim? Explain step by step.",
        "Give three arguments for and three arguments against {topic}.",
        "Plan a {number}-day trip to {place} with a small budget.",
        "{name} parked the car facing north, then turned right twice. Which direction is the car facing now?",
    ),
    (  # maths
        "{name} has {number} {item} and buys {number2} more. Then {name} gives {small} to {name2}. How many {item} are left?",
        "A train travels at {number2} km per hour for {small} hours. How far does it go?",
        "What is {number} plus {number2}? Show the steps.",
        "What is {number} times {small}?",
        "Solve for x: {small}x + {number} = {number2}.",
        "{name} buys {small} {item} for {number} dollars each and pays with a {number2}00 dollar note. How much change is there?",
        "What is {number} percent of {number2}0?",
        "The sides of a rectangle are {number} and {small}. Compute its area and perimeter.",
        "A class has {number2} students. {number} percent of them play football. How many is that?",
        "{name} reads {number} pages a day. How many days does a book of {number2}0 pages take?",
        "If f(x) = {small}x^2 - {number}x + 1, find the value of f(2).",
        "What is the average of {number}, {number2} and {small}?",
        "A bag holds {small} {colour} and {number} {colour2} {item}. What is the probability of drawing a {colour} one?",
        "{name} earns {number} dollars an hour and works {small} hours a day, five days a week. How much is that in a month?",
    ),
    (  # code
        "Write a {language} function that {task}.",
        "Write a {language} program that {task}, and explain how it works.",
        "Explain {concept} with an example in {language}.",
        "What is {concept}?",
        "How do I {task_verb} in {language}?",
        "What is the difference between {concept} and {concept2}?",
        "Write a simple HTML page about {topic} with a heading and a list.",
        "Write unit tests in Python for a function that {task}.",
        "Write an SQL query that counts the {item} of every {job} in a table.",
        "Write a regular expression that matches dates like 12 {month} 2021.",
        "Find the bug: def f(items):\n    total = 0\n    for i in range(1, len(items)):\n        total += items[i]\n    return total / len(items)\nIt is meant to be a function that computes the average.",
        "Implement a program in {language} that {task} and then {task2}.",
    ),
    (  # extraction
        "Extract all names and places from this text: '{name} met {name2} in {place} last {month}. They talked about {topic} and ate {food}.' Return them as a list.",
        "Make a table with two columns of these: {name} ate {number} {item}, {name2} ate {number2} {item}, {name3} ate {small}.",
        "Return the following as JSON: {name}, {number} years old, {job}, lives in {place}.",
        "Summarise in one sentence: {name} is a {job} who moved from {place} to {place2} because of {topic}. After {small} years, {name} opened a shop that sells {item} and {food}.",
        "Rate this review from 1 to 5 and explain: 'I bought {product} last {month}. It worked well for {number} days, then it broke.'",
        "Sort these by alphabet: {animal}, {animal2}, {colour}, {item}, {job}.",
        "Which of these are countries and which are animals: {place}, {animal}, {place2}, {animal2}?",
        "From this list, give the three largest numbers: {number}, {number2}, {small}, 17, 64, 5.",
        "What is the main point of this text? '{topic_cap} has changed the way people live. Many say that it is good for {topic2}, while others think of its costs.'",
        "Given this: {company} sold {number} {item} in {month} and {number2} in {month2}. By how much did sales change? Answer in CSV format.",
    ),
    (  # science
        "Explain {science} in simple terms.",
        "What is {science} and why is it important?",
        "How does {science} work? Give an example.",
        "What is the difference between {science} and {science2}?",
        "Describe the process of {science} in five steps.",
        "What are common misconceptions about {science}?",
        "Who discovered {science}, and how?",
        "Explain {science} to a ten-year-old child.",
        "What are the applications of {science}?",
        "Design an experiment to show {science} at home.",
        "List five facts about the {animal}.",
        "What does a {animal} eat, and where does it live?",
        "How do I make {food}? Give me the ingredients and the steps.",
    ),
    (  # society
        "Explain {society} in simple terms.",
        "What were the main causes of {society}?",
        "How did {society} change the world?",
        "Give me a short history of {place}.",
        "What should I see in {place} in {small} days?",
        "Discuss the role of {society} in today's world.",
        "What can we learn from {society}?",
        "What is the relation between {society} and {society2}?",
        "Give me {small} tips for {topic}.",
        "What does a {job} do? What skills are needed?",
        "How do I become a {job}?",
        "Outline a lesson about {society} for a class of teenagers.",
        "Why is {topic} important?",
        "What is the capital of {place}, and what is it known for?",
        "Recommend {small} books about {society} and say why.",
    ),
)  # fmt: skip


def fill(template: str, choose: random.Random) -> str:
    """The template with words of our lists and numbers in its places."""
    values: dict[str, object] = {}
    for name, words in WORDS.items():
        first, second, third = choose.sample(sorted(set(words)), 3)
        values |= {name: first, f"{name}2": second, f"{name}3": third}
        values[f"{name}_cap"] = first[0].upper() + first[1:]
    verb, _, rest = str(values["task"]).partition(" ")
    values["task_verb"] = f"{verb.removesuffix('s')} {rest}"
    values |= {"number": choose.randint(6, 40), "number2": choose.randint(41, 99)}
    values |= {"small": choose.randint(2, 9), "hour": choose.randint(1, 12)}
    return template.format(**values)


def prompts(count: int) -> Iterator[str]:
    """Different prompts, the kinds in turn."""
    choose, seen = random.Random(0), set[str]()
    number = 0
    while len(seen) < count:
        text = fill(choose.choice(KINDS[number % len(KINDS)]), choose)
        number += 1
        if text not in seen:
            seen.add(text)
            yield text


def main() -> None:
    count = int(sys.argv[1]) if len(sys.argv) > 1 else 4000
    for text in prompts(count):
        print(json.dumps({"prompt": text}))


if __name__ == "__main__":
    main()
