"""Prompts for heads of a model that writes programs: JSONL on the standard output.

    python assets/heads/code_prompts.py [COUNT] > prompts.jsonl

Seven kinds in turn: functions to complete, functions as material (code_functions.py), tasks in
many languages, queries of databases, shells, pages, questions. The same count gives the same
prompts, and the first ones of a larger count. All words are our own.
"""

import ast
import json
import random
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

SOURCE = Path(__file__).with_name("code_functions.py")
LANGUAGES = "Python,Python,Python,Python,JavaScript,JavaScript,TypeScript,Java,C,C++,C#,Go,Rust,Kotlin,Ruby,PHP,Bash,Swift".split(",")  # fmt: skip

# name, arguments, type of the result, what it does, an example and its result
STUBS = """
sum_of_evens|numbers: list[int]|int|Add up the even numbers of a list.|[1, 2, 4]|6
reverse_words|text: str|str|Reverse the order of the words in a text.|"one two three"|'three two one'
last_n_lines|text: str, n: int|list[str]|Return the last n lines of a text.|"a\\nb\\nc", 2|['b', 'c']
nth_root|value: float, n: int|float|Compute the n-th root of a positive number.|27, 3|3.0
shared_letters|first: str, second: str|list[str]|Return the sorted letters that appear in both words.|"table", "bread"|['a', 'b', 'e']
replace_negative|values: list[int], new: int|list[int]|Replace every negative number of a list with another number.|[1, -2, 3], 0|[1, 0, 3]
minutes_between|start: str, end: str|int|Return the number of minutes between two times of one day, given as HH:MM.|"08:30", "10:00"|90
is_armstrong|number: int|bool|Tell whether a number equals the sum of its digits, each to the power of their count.|153|True
largest_gap|values: list[int]|int|Return the largest difference between two neighbours of the sorted list.|[1, 9, 4]|5
compress_spaces|text: str|str|Replace each run of blanks by one underscore.|"a  b c"|'a_b_c'
without_keys|data: dict, keys: list[str]|dict|Return a copy of a dictionary without some of its keys.|{"a": 1, "b": 2}, ["a"]|{'b': 2}
deep_get|data: dict, path: str, default=None|object|Look up a value in nested dictionaries by a path such as "a.b.c".|{"a": {"b": 1}}, "a.b"|1
hamming|first: str, second: str|int|Count the places at which two texts of one length differ.|"karolin", "kathrin"|3
ends_with_any|text: str, endings: list[str]|bool|Check whether a text ends with one of several endings.|"a.png", [".jpg", ".png"]|True
cumulative_sum|values: list[int]|list[int]|Return the sums of all beginnings of a list.|[1, 2, 3]|[1, 3, 6]
interleave|first: list, second: list|list|Take items from two lists of one length in turn.|[1, 2], [3, 4]|[1, 3, 2, 4]
square_odds|numbers: list[int]|list[int]|Square the odd numbers and leave the even ones out.|[1, 2, 3]|[1, 9]
find_duplicates|items: list[str]|list[str]|List the items that occur more than once, in order of their second occurrence.|["a", "b", "a"]|['a']
perimeter|points: list[tuple[float, float]]|float|Compute the length of the outline of a polygon.|[(0, 0), (3, 0), (3, 4)]|12.0
is_strong_password|password: str|bool|Check for at least eight characters with a digit, a lower and an upper case letter.|"Abcdefg1"|True
dominant_colour|pixels: list[str]|str|Return the colour that occurs most often.|["red", "blue", "red"]|'red'
tax_due|income: float, brackets: list[tuple[float, float]]|float|Compute a tax from brackets, each with an upper limit and a rate.|100.0, [(50.0, 0.1), (200.0, 0.2)]|15.0
wrap_text|text: str, width: int|list[str]|Break a text into lines of at most the given width without cutting words.|"a bb ccc", 4|['a bb', 'ccc']
knapsack|weights: list[int], values: list[int], capacity: int|int|Return the largest value of items that fit into a bag.|[1, 3, 4], [15, 50, 60], 4|65
lowest_common|first: int, second: int|int|Compute the least common multiple of two numbers.|4, 6|12
tree_depth|tree: dict|int|Return the number of levels of a tree whose nodes have a list of children.|{"children": [{"children": []}]}|2
matrix_product|a: list[list[int]], b: list[list[int]]|list[list[int]]|Multiply two matrices.|[[1, 2]], [[3], [4]]|[[11]]
camel_case|text: str|str|Turn words with underscores into camel case.|"first_name"|'firstName'
is_perfect|number: int|bool|Check whether a number is the sum of its proper divisors.|28|True
primes_below|limit: int|list[int]|List the primes below a limit with the sieve of Eratosthenes.|10|[2, 3, 5, 7]
split_bill|total: float, people: int, tip: float = 0.1|float|Return what each person pays, tip included, rounded to cents.|100, 4|27.5
middle_letters|word: str|str|Return the letter in the middle of a word, or both of them.|"test"|'es'
count_words_with|words: list[str], letter: str|int|Count the words that contain a letter.|["sun", "moon"], "o"|1
to_base|number: int, base: int|str|Write a number in a base from 2 to 16.|255, 16|'FF'
hex_to_rgb|code: str|tuple[int, int, int]|Convert a colour such as "#ff0080" to its three numbers.|"#ff0080"|(255, 0, 128)
permutations_of|items: list[int]|list[list[int]]|List all orders of the items.|[1, 2]|[[1, 2], [2, 1]]
max_subarray|values: list[int]|int|Return the largest sum of neighbours in a list.|[-2, 1, -3, 4, -1, 2]|5
is_anagram|first: str, second: str|bool|Check whether two words have the same letters.|"listen", "silent"|True
temperature_alerts|readings: list[float], limit: float|list[int]|Return the indices of readings above a limit.|[20.5, 31.0], 30.0|[1]
rank_of|scores: list[int], score: int|int|Return the place of a score among all, the best being 1.|[50, 70, 60], 60|2
apply_twice|function, value|object|Apply a function to a value two times.|len, "ab"|2
pig_latin|word: str|str|Move the first letter of a word to its end and add "ay".|"dog"|'ogday'
nearest_point|points: list[tuple[int, int]], x: int, y: int|tuple[int, int]|Return the point that is nearest to (x, y).|[(0, 0), (5, 5)], 4, 4|(5, 5)
digital_root|number: int|int|Add the digits of a number until a single digit is left.|987|6
trim_mean|values: list[float], cut: int|float|Return the mean without the smallest and largest `cut` values.|[1, 2, 3, 100], 1|2.5
is_sorted_by_length|words: list[str]|bool|Check that no word is shorter than the one before.|["a", "bb"]|True
dot_product|first: list[float], second: list[float]|float|Compute the scalar product of two vectors.|[1, 2], [3, 4]|11
count_paths|rows: int, columns: int|int|Count the ways through a grid from the top left to the bottom right, right and down only.|2, 2|2
url_parts|url: str|dict[str, str]|Divide a URL into scheme, host and path.|"https://a.org/b"|{'scheme': 'https', 'host': 'a.org', 'path': '/b'}
most_expensive|items: list[dict], count: int|list[str]|Return the names of the most expensive items.|[{"name": "tea", "price": 3}, {"name": "jam", "price": 5}], 1|['jam']
letter_histogram|text: str|str|Draw a line of stars for each letter of a text.|"aab"|'a: **\\nb: *'
validate_isbn|code: str|bool|Check the last digit of an ISBN with ten digits.|"0306406152"|True
days_in_month|month: int, year: int|int|Return the number of days of a month.|2, 2024|29
merge_counts|first: dict[str, int], second: dict[str, int]|dict[str, int]|Add up the counts of two dictionaries.|{"a": 1}, {"a": 2, "b": 1}|{'a': 3, 'b': 1}
remove_at|items: list, index: int|list|Return a list without the item at an index.|[1, 2, 3], 1|[1, 3]
zigzag|values: list[int]|bool|Check that a list rises and falls in turn.|[1, 3, 2, 5]|True
keep_digits|text: str|str|Remove all that is not a digit.|"a1b2"|'12'
"""

TASKS = """
reads a text file and prints how many lines, words and characters it has
parses a log file and counts the errors of every hour
downloads a page and lists its links
sends a GET request to a JSON API and prints one field of the answer
implements a stack with push, pop and peek
implements a queue by two stacks
implements a linked list with insertion and deletion
implements a binary search tree with insertion and search
implements a cache that drops the least recently used entry
implements a simple bank account with deposits and withdrawals
implements a priority queue with a heap
implements a graph and its depth-first search
finds the shortest route between two cities with Dijkstra's algorithm
sorts a list of records by two fields
groups a list of orders by customer and sums their amounts
removes all duplicates from an array and keeps the order
merges two sorted arrays
computes the greatest common divisor of two numbers
generates the first n prime numbers
checks whether two words are anagrams
converts a decimal number to hexadecimal
validates an email address
validates a credit card number by the Luhn algorithm
generates a random password of a given length
reads a CSV file and computes the mean of a column
writes a list of objects to a JSON file
watches a folder and prints the names of new files
renames all files of a folder by a pattern
finds the ten largest files under a folder
simulates the roll of two dice and counts the sums
plays rock, paper, scissors against the user
plays a number guessing game
plays tic-tac-toe on the command line
solves a Sudoku by backtracking
solves the towers of Hanoi
solves the problem of eight queens
computes the n-th Fibonacci number with memoisation
computes the factorial of a large number
multiplies two matrices
rotates an array by k places
reverses a linked list
detects a cycle in a linked list
finds the longest substring without repeated letters
finds the most frequent element of an array
finds the missing number in an array from 1 to n
counts the vowels and consonants in a text
compresses a text by run lengths
encrypts and decrypts a text with a Vigenere key
formats a number with separators of thousands
converts a date from one format to another
computes the days between two dates
implements a timer that counts down
implements a to-do list with add, list and remove
implements an address book that is saved to a file
implements an inventory of products with quantities
implements a parking lot with spaces of several sizes
implements an event emitter with on and emit
implements a rate limiter with tokens
implements a retry with exponential backoff
implements a thread-safe counter
runs several downloads at once and waits for all of them
starts a small HTTP server with two routes
implements a REST endpoint that creates a user
connects to an SQLite database and inserts a row
parses the arguments of the command line
reads settings from a file and from environment variables
measures how long a function takes
logs messages with levels to a file
flattens a nested array
makes a deep copy of a nested object
debounces a function
maps, filters and reduces a list of numbers
computes the mean, median and standard deviation of numbers
draws a triangle of stars
prints the multiplication table up to 10
prints the calendar of a month
converts Roman numerals to numbers
evaluates an arithmetic expression with brackets
tokenises a simple language
implements the game of life for one generation
fills an area of a grid with a colour
computes the area of several shapes by inheritance
overloads an operator for vectors
defines an interface for shapes and two implementations
handles errors when a file does not exist
reads numbers from the user until an empty line
shuffles a deck of cards and deals five
computes the checksum of a file
splits a list into parts of equal size
finds all pairs of numbers with a given sum
searches a word in a grid of letters
computes the edit distance of two words
computes the longest common subsequence of two texts
counts how often every word occurs in a text
estimates pi by random points
converts between kilometres and miles
models a library with books and members
models employees with a salary and a bonus
trains a linear regression with gradient descent
loads a table with pandas and plots a column
builds a small neural network with PyTorch
scrapes a table from a web page
resizes all images of a folder
creates a thumbnail of an image
sends an email with an attachment
schedules a function every ten minutes
"""

COMPLETE = (
    "Complete this function.\n\n{stub}",
    "Complete the following Python function:\n\n```python\n{stub}```",
    "{stub}",
    "Please fill in the body of this function.\n\n{stub}",
    "Write the missing body:\n\n```python\n{stub}```\n\nReturn only the code.",
    "Implement this function so that the example holds.\n\n{stub}",
    "Finish the code below and return the whole function.\n\n{stub}",
    "from typing import Any\n\n\n{stub}",
    "I need this function finished:\n{stub}\nCan you complete it?",
    "Here is the beginning of my Python file. Continue it.\n\n{stub}",
)
MATERIAL = (
    "What does this function do?\n\n{code}",
    "Explain this code line by line.\n\n```python\n{code}```",
    "Write unit tests with pytest for this function:\n\n```python\n{code}```",
    "Write unittest test cases for the function below.\n\n{code}",
    "Add a docstring and type hints to this function.\n\n```python\n{bare}```",
    "Add comments to this code:\n\n{bare}",
    "Translate this Python function to {language}.\n\n{code}",
    "Rewrite this in {language}:\n\n```python\n{bare}```",
    "Refactor this function to be easier to read.\n\n{bare}",
    "What is the time complexity of this function? Can it be faster?\n\n{code}",
    "This function is wrong. Find the bug and correct it.\n\n{broken}",
    "Why does this test fail, and how do I fix it?\n\n```python\n{broken}```",
    "There is a mistake in my code:\n\n{broken}\nShow me the corrected version.",
    "Review this code and suggest improvements:\n\n```python\n{code}```",
    "Write a function with the same behaviour as this one, but in another way.\n\n{code}",
    "Give me a better name for this function and its variables, and rewrite it.\n\n{bare}",
    "Handle invalid input in this function by raising ValueError.\n\n{bare}",
    "Show me how to call this function with three different inputs.\n\n{code}",
    "Write a small command line program around this function.\n\n{bare}",
    "Make a class out of this function.\n\n{bare}",
)
ASK = (
    "Write a {language} program that {task}.",
    "Write a {language} function that {task}.",
    "In {language}, write code that {task}. Explain it briefly.",
    "{task_cap}: how do I do that in {language}?",
    "Give me a complete {language} example that {task}.",
    "I want a {language} script that {task}. Only the code, please.",
    "Create a {language} class that {task}.",
    "Can you show me {language} code that {task} and handles errors?",
    "Write clean, commented {language} code that {task}.",
)

SCHEMAS = """
employees(id, name, department, salary, hired)|employee|department|salary
orders(id, customer_id, product, amount, created)|order|product|amount
students(id, name, class, grade, born)|student|class|grade
books(id, title, author, price, published)|book|author|price
flights(id, airline, origin, destination, duration)|flight|airline|duration
movies(id, title, director, rating, year)|movie|director|rating
sensors(id, room, kind, value, measured)|reading|room|value
visits(id, page, country, seconds, visited)|visit|country|seconds
matches(id, home_team, away_team, goals, played)|match|home_team|goals
tickets(id, agent, priority, hours, opened)|ticket|agent|hours
""".strip().splitlines()
QUERIES = (
    "Given the table {table}, write an SQL query that returns the average {number} of every {group}.",
    "Table: {table}. Write SQL to find the {few} rows with the highest {number}.",
    "With {table}, count the rows of each {group} and keep those with more than {few}.",
    "Write an SQL statement that creates the table {table} with fitting types.",
    "Write SQL that inserts three rows into {table}.",
    "How do I delete every {one} of {table} whose {number} is below {count}?",
    "Write a query on {table} that ranks each {one} by {number} within its {group}, with a window function.",
    "Explain what this does: SELECT {group}, MAX({number}) FROM {name} GROUP BY {group} ORDER BY 2 DESC LIMIT {few};",
    "Write an SQL query on {table} for every {one} whose {number} is above the average of its {group}.",
    "Which index would you add to {table} to find rows by {group}? Show the statement.",
    "Write Python code with sqlite3 that reads {table} and prints the sum of {number} for each {group}.",
    "Write an UPDATE that raises the {number} of every {one} in one {group} of {table} by {few} percent.",
    "Define a class for a row of {table} with SQLAlchemy.",
    "Write a pandas expression that gives the mean {number} by {group} of a data frame with the columns of {table}.",
)
SHELL_WHAT = "all .log files older than {count} days,every .txt file that contains the word TODO,the {few} largest files under the current folder,empty folders,files that changed today,all images under a folder,lines with an IP address in access.log,processes that use more than {count} percent of memory,duplicate lines in a file,files with spaces in their names".split(",")  # fmt: skip
SHELL = (
    "Write a Bash command that finds {what}.",
    "Write a Bash script that lists {what} and asks before it deletes them.",
    "How do I count {what} in a Linux shell?",
    "Write a Bash script with a loop over {what} that copies them to a backup folder.",
    "Explain this command: find . -name '*.py' -mtime -{few} | xargs grep -n TODO | sort | head -{count}",
    "Write a Bash function that takes a folder and prints its size and the number of its files.",
    "Write a Dockerfile for a {framework} application that listens on port {port}.",
    "Write a Makefile with targets build, test and clean for a project in {language}.",
    "How do I undo the last {few} commits in Git without losing the changes?",
    "Which Git commands create a branch for {topic}, commit to it and merge it?",
    "Write a GitHub Actions workflow that runs the tests of a {language} project.",
    "Write a docker-compose.yml with a {framework} service on port {port} and a PostgreSQL database.",
    "Write a cron line that runs backup.sh every day at {few} o'clock, and explain its fields.",
    "Write an nginx configuration that forwards / to port {port}.",
    "Write a regular expression that matches {pattern}, and explain its parts.",
    "Write a Python script that finds {what}.",
    "Write a .gitignore for a {language} project.",
)
PATTERNS = "dates such as 2024-05-31,phone numbers with a country code,hexadecimal colours,URLs with http or https,words that begin with a capital,numbers with decimals,times such as 23:59,HTML tags,postcodes of five digits,text in double quotes,IPv4 addresses,user names of 3 to 16 letters or digits".split(",")  # fmt: skip
FRAMEWORKS = "Flask,FastAPI,Django,Node.js,Express,Spring Boot,Rails,Go".split(",")
TOPICS = "a bakery,a photo album,a weather report,a to-do list,a login form,a music player,a recipe,a product page,a portfolio,a quiz,a calendar,a shopping cart,a chat window,a newsletter,a travel blog,a library,a fitness tracker,a clock".split(",")  # fmt: skip
PAGES = (
    "Write an HTML page for {topic} with a heading, a list and a footer.",
    "Write HTML and CSS for {topic} with two columns that become one on a phone.",
    "Write a web page with JavaScript for {topic}.",
    "Write a React component for {topic}.",
    "Write CSS that centres {topic} on the page and gives it a shadow.",
    "Write an HTML form for {topic} and validate it with JavaScript.",
    "Write a JavaScript function that fetches the data of {topic} and shows them in a table.",
    "Write a TypeScript interface for the data of {topic}, and a function that sorts them.",
    "Write an Express route that returns the data of {topic} as JSON.",
    "Write a {framework} endpoint for {topic} with GET and POST.",
    "Write a Vue component for {topic}.",
    "Write a JSON example for the data of {topic}, and its JSON Schema.",
    "Design the database tables for {topic}.",
    "Design the classes of a program for {topic} in {language}.",
    "Write an animation in CSS for {topic}.",
    "Write Python code with tkinter for {topic}.",
)
CONCEPTS = "recursion,a closure,a decorator,a generator,a context manager,list comprehension,inheritance,polymorphism,an abstract class,an interface,a hash table,a linked list,a binary tree,big O notation,a race condition,a deadlock,a mutex,async and await,a promise,dependency injection,the singleton pattern,the observer pattern,the factory pattern,unit tests,mocking,a REST API,GraphQL,a foreign key,a transaction,an index of a database,normalisation,garbage collection,a pointer,a reference,immutability,a lambda function,type hints,generics,exceptions,a virtual environment,a container,continuous integration,a merge conflict,rebase,semantic versioning,caching,memoisation,dynamic programming,a greedy algorithm,binary search,merge sort,a heap,a trie,a stack overflow,an environment variable,a JSON Web Token,CORS,a WebSocket,a message queue,a load balancer".split(",")  # fmt: skip
ERRORS = "TypeError: 'NoneType' object is not subscriptable,IndexError: list index out of range,KeyError: 'name',ModuleNotFoundError: No module named 'requests',RecursionError: maximum recursion depth exceeded,UnboundLocalError: local variable 'x' referenced before assignment,AttributeError: 'list' object has no attribute 'split',ValueError: invalid literal for int() with base 10: 'abc',ZeroDivisionError: division by zero,IndentationError: unexpected indent,UnicodeDecodeError: 'utf-8' codec can't decode byte,TypeError: Cannot read properties of undefined,ReferenceError: x is not defined,NullPointerException,segmentation fault (core dumped),error: cannot borrow as mutable because it is also borrowed as immutable,CORS policy: No 'Access-Control-Allow-Origin' header,fatal: not a git repository,permission denied (publickey),port is already allocated".split(",")  # fmt: skip
QUESTIONS = (
    "What is {concept}? Show a short example in {language}.",
    "Explain {concept} to a beginner.",
    "When should I use {concept}, and when not?",
    "What is the difference between {concept} and {concept2}?",
    "Give me a {language} example of {concept}.",
    "What are common mistakes with {concept}?",
    "What does this error mean and how do I fix it? {error}",
    "I get this error in my program: {error}. What should I check?",
    "Write {few} questions for an interview about {concept}, with answers.",
    "How would you test a program that uses {concept}?",
    "Show {concept} in {language} and in {language2}.",
    "How do I {verb} in {language}?",
    "What is the best way to {verb} in {language}? Compare two ways.",
)
VERBS = "read a file line by line,sort a list of objects by a field,reverse a string,join strings with a comma,parse JSON,format a date,make an HTTP request,copy an array,remove an item from a list,check whether a key exists,loop over a dictionary,catch an exception,round a number,generate a random number,convert a string to a number,split a string,measure the time of a function,write to a file,define a constant,create a class,compare two dates,find the maximum of a list,filter an array,run a shell command,read an environment variable,start a thread,write a unit test,install a package,debug a program,concatenate two arrays".split(",")  # fmt: skip


@dataclass(frozen=True)
class Function:
    """A function of code_functions.py. code: its source; stub: up to the docstring's end; bare:
    without the docstring and type hints; broken: with one change that makes it wrong."""

    code: str
    stub: str
    bare: str
    broken: tuple[str, ...]


@cache
def functions() -> tuple[Function, ...]:
    """All functions of code_functions.py."""
    text = SOURCE.read_text("utf-8")
    lines = text.splitlines()
    found = []
    for node in ast.parse(text).body:
        if isinstance(node, ast.FunctionDef):
            start, doc = node.lineno - 1, node.body[0].end_lineno
            stub = "\n".join(lines[start:doc]) + "\n"
            rest = "\n".join(lines[doc : node.end_lineno]) + "\n"
            arguments = ", ".join(argument.arg for argument in node.args.args)
            bare = f"def {node.name}({arguments}):\n{rest}"
            found.append(Function(stub + rest, stub, bare, tuple(_broken(stub, rest))))
    return tuple(found)


CHANGES = (" + 1", ""), (" - 1", ""), (" < ", " <= "), (" >= ", " > "), (" + ", " - "), ("max(", "min("), (" and ", " or "), ("== 0", "== 1"), ("[0]", "[1]"), (" not in ", " in "), ("sorted(", "list("), ("result", "results"), ("return ", "print(")  # fmt: skip


def _broken(stub: str, rest: str) -> Iterator[str]:
    """The function with one of the changes that can be made in it."""
    for old, new in CHANGES:
        if old in rest:
            changed = rest.replace(old, new, 1)
            yield stub + (changed if new != "print(" else _printing(rest))


def _printing(rest: str) -> str:
    """The last line that returns a value prints it."""
    before, _, value = rest.rstrip("\n").rpartition("return ")
    return f"{before}print({value})\n" if "\n" not in value else rest


def complete(choose: random.Random) -> str:
    """A function to complete, with a docstring and mostly an example."""
    template = choose.choice(COMPLETE)
    if choose.random() < 0.45:
        return template.format(stub=choose.choice(functions()).stub)
    line = choose.choice(STUBS.strip().splitlines()).replace("\\n", "\n")
    name, arguments, kind, does, example, result = line.split("|")
    doc = does if choose.random() < 0.7 else f"{does[:-1]}: see the example."
    shown = f"    >>> {name}({example})\n    {result}\n"
    quotes = choose.choice(('"""', '"""', "'''"))
    if choose.random() < 0.2:
        arguments = ", ".join(part.split(":")[0] for part in _split(arguments))
        head = f"def {name}({arguments}):\n"
    else:
        head = f"def {name}({arguments}) -> {kind}:\n"
    if choose.random() < 0.25:
        shown = f"    Example: {name}({example}) returns {result}\n"
    body = f"    {quotes} {doc}\n{shown}    {quotes}\n"
    return template.format(stub=head + body)


def _split(arguments: str) -> list[str]:
    """The arguments of a signature, divided at the commas outside of brackets."""
    parts, depth = [""], 0
    for letter in arguments:
        depth += (letter == "[") - (letter == "]")
        if letter == "," and not depth:
            parts.append("")
        else:
            parts[-1] += letter
    return [part.strip() for part in parts]


def material(choose: random.Random) -> str:
    """A question about a whole function."""
    one, language = choose.choice(functions()), choose.choice(LANGUAGES[4:])
    broken = choose.choice(one.broken or (one.code,))
    template = choose.choice(MATERIAL)
    return template.format(code=one.code, bare=one.bare, broken=broken, language=language)


def ask(choose: random.Random) -> str:
    """A task in one of the languages."""
    task = choose.choice(TASKS.strip().splitlines())
    verb, _, rest = task.partition(" ")
    return choose.choice(ASK).format(
        language=choose.choice(LANGUAGES), task=task, task_cap=f"A program {verb} {rest}"
    )


def query(choose: random.Random) -> str:
    """A question about a table."""
    table, one, group, number = choose.choice(SCHEMAS).split("|")
    return choose.choice(QUERIES).format(
        table=table, name=table.partition("(")[0], one=one, group=group, number=number,
        few=choose.randint(2, 9), count=choose.randint(10, 90),
    )  # fmt: skip


def words(choose: random.Random) -> dict[str, object]:
    """Words for the places of the other kinds' templates."""
    few, count = choose.randint(2, 9), choose.randint(10, 90)
    first, second = choose.sample(CONCEPTS, 2)
    return {
        "few": few,
        "count": count,
        "what": choose.choice(SHELL_WHAT).format(few=few, count=count),
        "framework": choose.choice(FRAMEWORKS),
        "port": choose.choice((3000, 5000, 8000, 8080)),
        "topic": choose.choice(TOPICS),
        "pattern": choose.choice(PATTERNS),
        "language": choose.choice(LANGUAGES),
        "language2": choose.choice(LANGUAGES[4:]),
        "concept": first,
        "concept2": second,
        "error": choose.choice(ERRORS),
        "verb": choose.choice(VERBS),
    }


def filled(*templates: str) -> Callable[[random.Random], str]:
    """A kind that fills its templates with words."""
    return lambda choose: choose.choice(templates).format(**words(choose))


# completions, material and tasks twice as often as the others
KINDS = (
    complete, ask, material, query, complete, ask, material,
    filled(*SHELL), filled(*PAGES), filled(*QUESTIONS),
)  # fmt: skip


def prompts(count: int) -> Iterator[str]:
    """Different prompts, the kinds in turn."""
    choose, seen = random.Random(0), set[str]()
    number = 0
    while len(seen) < count:
        text = KINDS[number % len(KINDS)](choose)
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
