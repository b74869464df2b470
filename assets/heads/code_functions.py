"""Small functions whose sources are the material of code prompts (code_prompts.py): to complete,
explain, mend, test or translate. Each docstring says in one sentence what the function does, and
its examples hold (`python -m doctest assets/heads/code_functions.py`). All are our own.
"""


def chunk_list(items: list[int], size: int) -> list[list[int]]:
    """Split a list into parts of the given size, of which the last may be shorter.

    >>> chunk_list([1, 2, 3, 4, 5], 2)
    [[1, 2], [3, 4], [5]]
    """
    return [items[start : start + size] for start in range(0, len(items), size)]


def word_lengths(sentence: str) -> dict[str, int]:
    """Map every word of a sentence to its number of letters.

    >>> word_lengths("we like tea")
    {'we': 2, 'like': 4, 'tea': 3}
    """
    return {word: len(word) for word in sentence.split()}


def title_case(text: str) -> str:
    """Write the first letter of every word in upper case and the others in lower case.

    >>> title_case("hELLO big woRLD")
    'Hello Big World'
    """
    return " ".join(word[:1].upper() + word[1:].lower() for word in text.split(" "))


def is_leap_year(year: int) -> bool:
    """Tell whether a year of the Gregorian calendar has 366 days.

    >>> is_leap_year(2000)
    True
    >>> is_leap_year(1900)
    False
    """
    return year % 4 == 0 and (year % 100 != 0 or year % 400 == 0)


def celsius_table(start: int, stop: int, step: int) -> list[tuple[int, float]]:
    """List temperatures in Celsius with their values in Fahrenheit.

    >>> celsius_table(0, 20, 10)
    [(0, 32.0), (10, 50.0)]
    """
    table = []
    for celsius in range(start, stop, step):
        table.append((celsius, celsius * 9 / 5 + 32))
    return table


def invert_mapping(mapping: dict[str, str]) -> dict[str, list[str]]:
    """Map every value of a dictionary to the sorted list of its keys.

    >>> invert_mapping({"a": "x", "b": "y", "c": "x"})
    {'x': ['a', 'c'], 'y': ['b']}
    """
    inverted: dict[str, list[str]] = {}
    for key, value in sorted(mapping.items()):
        inverted.setdefault(value, []).append(key)
    return inverted


def moving_average(values: list[float], window: int) -> list[float]:
    """Return the mean of every run of `window` neighbouring values.

    >>> moving_average([1, 2, 3, 4], 2)
    [1.5, 2.5, 3.5]
    """
    result = []
    for start in range(len(values) - window + 1):
        result.append(sum(values[start : start + window]) / window)
    return result


def is_valid_pin(pin: str) -> bool:
    """Check that a PIN consists of exactly four or six digits.

    >>> is_valid_pin("1234")
    True
    >>> is_valid_pin("12a4")
    False
    """
    return len(pin) in (4, 6) and pin.isdigit()


def cheapest_product(prices: dict[str, float]) -> str:
    """Return the name of the product with the lowest price.

    >>> cheapest_product({"tea": 2.5, "milk": 1.2})
    'milk'
    """
    return min(prices, key=lambda name: prices[name])


def count_by_length(words: list[str]) -> dict[int, int]:
    """Count how many words there are of each length.

    >>> count_by_length(["a", "bb", "cc"])
    {1: 1, 2: 2}
    """
    counts: dict[int, int] = {}
    for word in words:
        counts[len(word)] = counts.get(len(word), 0) + 1
    return counts


def spiral_order(matrix: list[list[int]]) -> list[int]:
    """Return the numbers of a matrix in the order of a clockwise spiral from the top left.

    >>> spiral_order([[1, 2, 3], [4, 5, 6], [7, 8, 9]])
    [1, 2, 3, 6, 9, 8, 7, 4, 5]
    """
    rows = [list(row) for row in matrix]
    result: list[int] = []
    while rows:
        result += rows.pop(0)
        rows = [list(row) for row in zip(*rows, strict=True)][::-1]
    return result


def insert_sorted(values: list[int], new: int) -> list[int]:
    """Insert a number into a sorted list so that it stays sorted.

    >>> insert_sorted([1, 4, 9], 5)
    [1, 4, 5, 9]
    """
    place = 0
    while place < len(values) and values[place] < new:
        place += 1
    return values[:place] + [new] + values[place:]


def initials(name: str) -> str:
    """Return the first letters of a person's names, each with a full stop behind it.

    >>> initials("ada king lovelace")
    'A.K.L.'
    """
    return "".join(f"{part[0].upper()}." for part in name.split())


def clamp(value: float, low: float, high: float) -> float:
    """Limit a number to the range from low to high.

    >>> clamp(12, 0, 10)
    10
    """
    if value < low:
        return low
    if value > high:
        return high
    return value


def seconds_to_clock(seconds: int) -> str:
    """Write a duration in seconds as hours, minutes and seconds with two digits each.

    >>> seconds_to_clock(3725)
    '01:02:05'
    """
    hours, rest = divmod(seconds, 3600)
    minutes, left = divmod(rest, 60)
    return f"{hours:02d}:{minutes:02d}:{left:02d}"


def remove_extra_spaces(text: str) -> str:
    """Replace every run of white space with a single space and strip both ends.

    >>> remove_extra_spaces("  too   many  spaces ")
    'too many spaces'
    """
    return " ".join(text.split())


def bubble_sort(values: list[int]) -> list[int]:
    """Sort a list by swapping neighbours that stand in the wrong order.

    >>> bubble_sort([3, 1, 2])
    [1, 2, 3]
    """
    result = list(values)
    for end in range(len(result) - 1, 0, -1):
        for place in range(end):
            if result[place] > result[place + 1]:
                result[place], result[place + 1] = result[place + 1], result[place]
    return result


def binary_search(values: list[int], wanted: int) -> int:
    """Find the place of a number in a sorted list by halving, or return -1.

    >>> binary_search([1, 3, 5, 7], 5)
    2
    """
    low, high = 0, len(values) - 1
    while low <= high:
        middle = (low + high) // 2
        if values[middle] == wanted:
            return middle
        if values[middle] < wanted:
            low = middle + 1
        else:
            high = middle - 1
    return -1


def merge_intervals(intervals: list[tuple[int, int]]) -> list[tuple[int, int]]:
    """Merge intervals that overlap or touch.

    >>> merge_intervals([(5, 8), (1, 3), (2, 4)])
    [(1, 4), (5, 8)]
    """
    merged: list[tuple[int, int]] = []
    for start, end in sorted(intervals):
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(merged[-1][1], end))
        else:
            merged.append((start, end))
    return merged


def pair_with_sum(values: list[int], target: int) -> tuple[int, int] | None:
    """Find two numbers of a list whose sum is the target.

    >>> pair_with_sum([2, 7, 11], 9)
    (2, 7)
    """
    seen: set[int] = set()
    for value in values:
        if target - value in seen:
            return target - value, value
        seen.add(value)
    return None


def run_lengths(text: str) -> list[tuple[str, int]]:
    """Encode a text as pairs of a character and the number of times it repeats.

    >>> run_lengths("aaab")
    [('a', 3), ('b', 1)]
    """
    runs: list[tuple[str, int]] = []
    for letter in text:
        if runs and runs[-1][0] == letter:
            runs[-1] = (letter, runs[-1][1] + 1)
        else:
            runs.append((letter, 1))
    return runs


def group_by_parity(numbers: list[int]) -> dict[str, list[int]]:
    """Divide numbers into even and odd ones.

    >>> group_by_parity([1, 2, 3, 4])
    {'even': [2, 4], 'odd': [1, 3]}
    """
    groups: dict[str, list[int]] = {"even": [], "odd": []}
    for number in numbers:
        groups["even" if number % 2 == 0 else "odd"].append(number)
    return groups


def powers_of_two(limit: int) -> list[int]:
    """List the powers of two that are below the limit.

    >>> powers_of_two(20)
    [1, 2, 4, 8, 16]
    """
    powers, power = [], 1
    while power < limit:
        powers.append(power)
        power *= 2
    return powers


def mask_email(address: str) -> str:
    """Hide all but the first letter of the name in an email address.

    >>> mask_email("rosa@example.org")
    'r***@example.org'
    """
    name, _, host = address.partition("@")
    return f"{name[0]}{'*' * (len(name) - 1)}@{host}"


def average_grade(grades: dict[str, list[int]]) -> dict[str, float]:
    """Return the mean grade of every student, rounded to two places.

    >>> average_grade({"Ann": [90, 80], "Bob": [70]})
    {'Ann': 85.0, 'Bob': 70.0}
    """
    return {name: round(sum(marks) / len(marks), 2) for name, marks in grades.items()}


def neighbours(row: int, column: int, height: int, width: int) -> list[tuple[int, int]]:
    """List the cells above, below, left and right of a cell that lie inside a grid.

    >>> neighbours(0, 0, 2, 2)
    [(1, 0), (0, 1)]
    """
    around = [(row - 1, column), (row + 1, column), (row, column - 1), (row, column + 1)]
    return [(y, x) for y, x in around if 0 <= y < height and 0 <= x < width]


def parse_pairs(text: str) -> dict[str, str]:
    """Read a text such as "a=1;b=2" into a dictionary.

    >>> parse_pairs("host=local;port=80")
    {'host': 'local', 'port': '80'}
    """
    pairs = {}
    for part in text.split(";"):
        if "=" in part:
            key, value = part.split("=", 1)
            pairs[key.strip()] = value.strip()
    return pairs


def digits_product(number: int) -> int:
    """Multiply the digits of a number.

    >>> digits_product(234)
    24
    """
    product = 1
    for digit in str(abs(number)):
        product *= int(digit)
    return product


def diagonal_sum(matrix: list[list[int]]) -> int:
    """Add the numbers on the main diagonal of a square matrix.

    >>> diagonal_sum([[1, 2], [3, 4]])
    5
    """
    return sum(row[place] for place, row in enumerate(matrix))


def longest_run(values: list[int]) -> int:
    """Return the length of the longest run of equal neighbours.

    >>> longest_run([1, 1, 2, 2, 2, 3])
    3
    """
    best = current = 0
    previous = None
    for value in values:
        current = current + 1 if value == previous else 1
        best = max(best, current)
        previous = value
    return best


def compound_interest(amount: float, rate: float, years: int) -> float:
    """Compute what an amount of money becomes with yearly interest in percent.

    >>> compound_interest(100, 10, 2)
    121.0
    """
    for _ in range(years):
        amount *= 1 + rate / 100
    return round(amount, 2)


def word_frequencies(text: str) -> list[tuple[str, int]]:
    """Count the words of a text without regard to case, the most frequent first.

    >>> word_frequencies("The cat and the dog")
    [('the', 2), ('and', 1), ('cat', 1), ('dog', 1)]
    """
    counts: dict[str, int] = {}
    for word in text.lower().split():
        counts[word] = counts.get(word, 0) + 1
    return sorted(counts.items(), key=lambda item: (-item[1], item[0]))


def snake_case(name: str) -> str:
    """Turn a name in camel case into snake case.

    >>> snake_case("userFirstName")
    'user_first_name'
    """
    result = ""
    for letter in name:
        result += f"_{letter.lower()}" if letter.isupper() else letter
    return result.lstrip("_")


def flatten_once(lists: list[list[int]]) -> list[int]:
    """Join lists of numbers into a single one.

    >>> flatten_once([[1], [2, 3], []])
    [1, 2, 3]
    """
    return [number for numbers in lists for number in numbers]


def percent_change(old: float, new: float) -> float:
    """Return by how many percent a value changed, rounded to one place.

    >>> percent_change(50, 60)
    20.0
    """
    if old == 0:
        raise ValueError("the old value must not be zero")
    return round((new - old) / old * 100, 1)


def top_scores(scores: dict[str, int], count: int) -> list[str]:
    """List the names of the players with the highest scores.

    >>> top_scores({"Ann": 3, "Bob": 9, "Cy": 5}, 2)
    ['Bob', 'Cy']
    """
    ranked = sorted(scores.items(), key=lambda item: item[1], reverse=True)
    return [name for name, _ in ranked[:count]]


def is_subsequence(short: str, text: str) -> bool:
    """Tell whether the letters of a short text appear in another text in the same order.

    >>> is_subsequence("ace", "abcde")
    True
    """
    rest = iter(text)
    return all(letter in rest for letter in short)


def swap_pairs(values: list[int]) -> list[int]:
    """Swap every two neighbours of a list; a last one without a partner stays.

    >>> swap_pairs([1, 2, 3, 4, 5])
    [2, 1, 4, 3, 5]
    """
    result = list(values)
    for place in range(0, len(result) - 1, 2):
        result[place], result[place + 1] = result[place + 1], result[place]
    return result


def price_with_discount(price: float, percent: float, minimum: float = 0.0) -> float:
    """Reduce a price by a percentage, but never below a minimum.

    >>> price_with_discount(80, 25)
    60.0
    """
    reduced = price * (1 - percent / 100)
    return max(round(reduced, 2), minimum)


def missing_numbers(values: list[int]) -> list[int]:
    """List the whole numbers between the smallest and the largest that are missing.

    >>> missing_numbers([1, 4, 6])
    [2, 3, 5]
    """
    present = set(values)
    return [number for number in range(min(values), max(values)) if number not in present]


def row_with_most_ones(matrix: list[list[int]]) -> int:
    """Return the index of the row that has the most ones.

    >>> row_with_most_ones([[0, 1], [1, 1]])
    1
    """
    best_row, best_count = 0, -1
    for index, row in enumerate(matrix):
        count = row.count(1)
        if count > best_count:
            best_row, best_count = index, count
    return best_row


def shortest_word(text: str) -> str:
    """Return the shortest word of a text, the first one of equals.

    >>> shortest_word("some words are short")
    'are'
    """
    return min(text.split(), key=len)


def balance_after(transactions: list[tuple[str, float]]) -> float:
    """Compute the balance of an account after its deposits and withdrawals.

    >>> balance_after([("deposit", 50.0), ("withdraw", 20.0)])
    30.0
    """
    balance = 0.0
    for kind, amount in transactions:
        if kind == "deposit":
            balance += amount
        elif kind == "withdraw":
            balance -= amount
        else:
            raise ValueError(f"unknown kind of transaction: {kind}")
    return balance


def distance(a: tuple[float, float], b: tuple[float, float]) -> float:
    """Compute the distance between two points of the plane.

    >>> distance((0, 0), (3, 4))
    5.0
    """
    return float(((a[0] - b[0]) ** 2 + (a[1] - b[1]) ** 2) ** 0.5)


def vowel_positions(text: str) -> list[int]:
    """List the indices at which a text has a vowel.

    >>> vowel_positions("banana")
    [1, 3, 5]
    """
    return [index for index, letter in enumerate(text.lower()) if letter in "aeiou"]


def transpose(matrix: list[list[int]]) -> list[list[int]]:
    """Turn the rows of a matrix into its columns.

    >>> transpose([[1, 2, 3], [4, 5, 6]])
    [[1, 4], [2, 5], [3, 6]]
    """
    return [list(column) for column in zip(*matrix, strict=True)]


def count_islands(grid: list[list[int]]) -> int:
    """Count the groups of ones in a grid that are connected by their sides.

    >>> count_islands([[1, 0, 1], [1, 0, 0]])
    2
    """
    cells = {(y, x) for y, row in enumerate(grid) for x, value in enumerate(row) if value}
    count = 0
    while cells:
        count += 1
        waiting = [cells.pop()]
        while waiting:
            y, x = waiting.pop()
            for near in ((y - 1, x), (y + 1, x), (y, x - 1), (y, x + 1)):
                if near in cells:
                    cells.remove(near)
                    waiting.append(near)
    return count


def shortest_path(graph: dict[str, list[str]], start: str, goal: str) -> list[str]:
    """Find a shortest path between two nodes of a graph by breadth-first search.

    >>> shortest_path({"a": ["b", "c"], "b": ["d"], "c": ["d"], "d": []}, "a", "d")
    ['a', 'b', 'd']
    """
    paths = [[start]]
    seen = {start}
    while paths:
        path = paths.pop(0)
        if path[-1] == goal:
            return path
        for node in graph[path[-1]]:
            if node not in seen:
                seen.add(node)
                paths.append([*path, node])
    return []


def coin_change(coins: list[int], amount: int) -> int:
    """Return the fewest coins that make up an amount, or -1 if that is impossible.

    >>> coin_change([1, 4, 5], 8)
    2
    """
    fewest = [0] + [amount + 1] * amount
    for total in range(1, amount + 1):
        for coin in coins:
            if coin <= total:
                fewest[total] = min(fewest[total], fewest[total - coin] + 1)
    return fewest[amount] if fewest[amount] <= amount else -1


def roman_to_number(numeral: str) -> int:
    """Convert a Roman numeral to a number.

    >>> roman_to_number("XIV")
    14
    """
    values = {"I": 1, "V": 5, "X": 10, "L": 50, "C": 100, "D": 500, "M": 1000}
    total = 0
    for index, letter in enumerate(numeral):
        value = values[letter]
        if index + 1 < len(numeral) and values[numeral[index + 1]] > value:
            total -= value
        else:
            total += value
    return total


def quick_sort(values: list[int]) -> list[int]:
    """Sort a list by dividing it around a pivot.

    >>> quick_sort([3, 6, 1, 1])
    [1, 1, 3, 6]
    """
    if len(values) <= 1:
        return values
    pivot = values[len(values) // 2]
    smaller = [value for value in values if value < pivot]
    equal = [value for value in values if value == pivot]
    larger = [value for value in values if value > pivot]
    return quick_sort(smaller) + equal + quick_sort(larger)


def subsets(items: list[int]) -> list[list[int]]:
    """List all subsets of a list.

    >>> subsets([1, 2])
    [[], [1], [2], [1, 2]]
    """
    result: list[list[int]] = [[]]
    for item in items:
        result += [[*subset, item] for subset in result]
    return result


def overdue_books(loans: dict[str, int], today: int, limit: int = 14) -> list[str]:
    """List the books that were lent more than `limit` days ago, in alphabetical order.

    >>> overdue_books({"Emma": 1, "Dune": 10}, 20)
    ['Emma']
    """
    return sorted(title for title, day in loans.items() if today - day > limit)


def pascal_row(number: int) -> list[int]:
    """Compute a row of Pascal's triangle, counted from zero.

    >>> pascal_row(4)
    [1, 4, 6, 4, 1]
    """
    row = [1]
    for _ in range(number):
        row = [a + b for a, b in zip([0, *row], [*row, 0], strict=True)]
    return row


def acronym(phrase: str) -> str:
    """Build an acronym from the first letters of a phrase, skipping words of up to two letters.

    >>> acronym("world of health organisation")
    'WHO'
    """
    return "".join(word[0].upper() for word in phrase.split() if len(word) > 2)


def unique_in_order(items: list[str]) -> list[str]:
    """Remove repeated items from a list and keep the order of the first ones.

    >>> unique_in_order(["b", "a", "b"])
    ['b', 'a']
    """
    return list(dict.fromkeys(items))


def water_trapped(heights: list[int]) -> int:
    """Compute how much rain a row of walls of the given heights can hold.

    >>> water_trapped([2, 0, 1, 3])
    3
    """
    total = 0
    for place, height in enumerate(heights):
        level = min(max(heights[: place + 1]), max(heights[place:]))
        total += level - height
    return total


def weekday_name(number: int) -> str:
    """Return the name of a day of the week, where 0 is Monday.

    >>> weekday_name(6)
    'Sunday'
    """
    names = ["Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday"]
    if not 0 <= number < len(names):
        raise ValueError("a week has seven days")
    return names[number]


def zip_longest_fill(first: list[int], second: list[int], fill: int) -> list[tuple[int, int]]:
    """Pair the items of two lists and fill up the shorter one.

    >>> zip_longest_fill([1, 2], [3], 0)
    [(1, 3), (2, 0)]
    """
    length = max(len(first), len(second))
    longer_first = first + [fill] * (length - len(first))
    longer_second = second + [fill] * (length - len(second))
    return list(zip(longer_first, longer_second, strict=True))


def total_by_customer(orders: list[dict[str, object]]) -> dict[str, float]:
    """Add up the amounts of the orders of every customer.

    >>> total_by_customer([{"customer": "Ann", "amount": 5.0}, {"customer": "Ann", "amount": 2.5}])
    {'Ann': 7.5}
    """
    totals: dict[str, float] = {}
    for order in orders:
        name = str(order["customer"])
        totals[name] = totals.get(name, 0.0) + float(str(order["amount"]))
    return totals


def edit_distance(first: str, second: str) -> int:
    """Compute the fewest letters to insert, delete or replace to turn one word into another.

    >>> edit_distance("kitten", "sitting")
    3
    """
    previous = list(range(len(second) + 1))
    for row, a in enumerate(first, 1):
        current = [row]
        for column, b in enumerate(second, 1):
            change = previous[column - 1] + (a != b)
            current.append(min(previous[column] + 1, current[-1] + 1, change))
        previous = current
    return previous[-1]


def rotate_square(matrix: list[list[int]]) -> list[list[int]]:
    """Turn a square matrix by ninety degrees clockwise.

    >>> rotate_square([[1, 2], [3, 4]])
    [[3, 1], [4, 2]]
    """
    return [list(row) for row in zip(*matrix[::-1], strict=True)]


def stock_profit(prices: list[int]) -> int:
    """Return the largest profit from buying once and selling once later.

    >>> stock_profit([7, 1, 5, 3, 6])
    5
    """
    lowest, profit = prices[0], 0
    for price in prices[1:]:
        profit = max(profit, price - lowest)
        lowest = min(lowest, price)
    return profit
