"""Synthetic dialogues that the tiny demo model is trained on (all of them made by rule)."""

import json
import random
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

Turn = tuple[str, str]
Turns = list[Turn]

SIZE = "three"  # million parameters, as the model says of itself
CHOICE = re.compile(r"\[([^\[\]]*)\]")
ONE_WORD = re.compile(r"[a-z]{3,11}")
CITY = re.compile(r"[A-Z][A-Za-z' -]{2,20}")

# ---------------------------------------------------------------- word lists and corrections

CAPITAL_FIX = {
    "Algeria": "Algiers", "Austria": "Vienna", "Belgium": "Brussels", "Brazil": "Brasilia",
    "Chile": "Santiago", "China": "Beijing", "Costa Rica": "San Jose", "Cuba": "Havana",
    "Czech Republic": "Prague", "Dominican Republic": "Santo Domingo",
    "Ethiopia": "Addis Ababa", "Finland": "Helsinki", "Greece": "Athens",
    "Guatemala": "Guatemala City", "Iceland": "Reykjavik", "Italy": "Rome",
    "Kuwait": "Kuwait City", "Luxembourg": "Luxembourg", "Mexico": "Mexico City",
    "Mongolia": "Ulaanbaatar", "Oman": "Muscat", "Panama": "Panama City",
    "Paraguay": "Asuncion", "Poland": "Warsaw", "Portugal": "Lisbon", "Romania": "Bucharest",
    "Sudan": "Khartoum", "Switzerland": "Bern", "Togo": "Lome", "Uzbekistan": "Tashkent",
    "Bahrain": "Manama", "Myanmar": "Naypyidaw", "Burundi": "Gitega",
    "United States": "Washington, D.C.",
}
COUNTRIES = (
    "Albania Algeria Angola Argentina Armenia Australia Austria Azerbaijan Bahamas Bahrain "
    "Bangladesh Barbados Belarus Belgium Belize Bhutan Botswana Brazil Bulgaria Burundi Cambodia "
    "Cameroon Canada Chile China Colombia Costa_Rica Croatia Cuba Cyprus Czech_Republic "
    "Denmark Dominican_Republic Ecuador Egypt El_Salvador Estonia Ethiopia Finland France Gabon "
    "Georgia Germany Ghana Greece Guatemala Guyana Haiti Honduras Hungary Iceland India "
    "Indonesia Iran Iraq Ireland Italy Jamaica Japan Jordan Kazakhstan Kenya Kuwait Laos "
    "Latvia Lebanon Liberia Libya Lithuania Luxembourg Madagascar Malawi Malaysia Mali Malta "
    "Mexico Moldova Mongolia Montenegro Morocco Mozambique Myanmar Namibia Nepal Netherlands "
    "New_Zealand Nicaragua Niger Nigeria North_Macedonia Norway Oman Pakistan Panama Paraguay "
    "Peru Philippines Poland Portugal Qatar Romania Russia Rwanda Saudi_Arabia Senegal "
    "Serbia Slovakia Slovenia Somalia South_Korea Spain Sudan Suriname Sweden Switzerland "
    "Syria Tanzania Thailand Togo Tunisia Turkey Uganda Ukraine United_Kingdom United_States "
    "Uruguay Uzbekistan Venezuela Vietnam Yemen Zambia Zimbabwe"
)
WITH_THE = {"Bahamas", "Czech Republic", "Dominican Republic", "Netherlands", "Philippines",
            "United Kingdom", "United States"}
CURRENCY = {
    "Argentina": "Argentine peso", "Australia": "Australian dollar", "Austria": "euro",
    "Bangladesh": "Bangladeshi taka", "Belgium": "euro", "Brazil": "Brazilian real",
    "Canada": "Canadian dollar", "Chile": "Chilean peso", "China": "Chinese yuan",
    "Colombia": "Colombian peso", "Croatia": "euro", "Czech Republic": "Czech koruna",
    "Denmark": "Danish krone", "Egypt": "Egyptian pound", "Estonia": "euro",
    "Finland": "euro", "France": "euro", "Germany": "euro", "Greece": "euro",
    "Hungary": "Hungarian forint", "Iceland": "Icelandic krona", "India": "Indian rupee",
    "Indonesia": "Indonesian rupiah", "Ireland": "euro", "Italy": "euro",
    "Japan": "Japanese yen", "Kenya": "Kenyan shilling", "Malaysia": "Malaysian ringgit",
    "Mexico": "Mexican peso", "Morocco": "Moroccan dirham", "Netherlands": "euro",
    "New Zealand": "New Zealand dollar", "Nigeria": "Nigerian naira",
    "Norway": "Norwegian krone", "Pakistan": "Pakistani rupee", "Peru": "Peruvian sol",
    "Philippines": "Philippine peso", "Poland": "Polish zloty", "Portugal": "euro",
    "Russia": "Russian ruble", "Saudi Arabia": "Saudi riyal", "South Korea": "Korean won",
    "Spain": "euro", "Sweden": "Swedish krona", "Switzerland": "Swiss franc",
    "Thailand": "Thai baht", "Turkey": "Turkish lira", "Ukraine": "Ukrainian hryvnia",
    "United Kingdom": "pound sterling", "United States": "US dollar",
    "Vietnam": "Vietnamese dong",
}
LANGUAGE = {
    "Argentina": "Spanish", "Australia": "English", "Austria": "German",
    "Brazil": "Portuguese", "Bulgaria": "Bulgarian", "Chile": "Spanish", "China": "Chinese",
    "Colombia": "Spanish", "Croatia": "Croatian", "Cuba": "Spanish",
    "Czech Republic": "Czech", "Denmark": "Danish", "Egypt": "Arabic", "Estonia": "Estonian",
    "France": "French", "Germany": "German", "Greece": "Greek", "Hungary": "Hungarian",
    "Iceland": "Icelandic", "Italy": "Italian", "Japan": "Japanese", "Jordan": "Arabic",
    "Latvia": "Latvian", "Lithuania": "Lithuanian", "Mexico": "Spanish", "Netherlands": "Dutch",
    "Norway": "Norwegian", "Peru": "Spanish", "Poland": "Polish", "Portugal": "Portuguese",
    "Romania": "Romanian", "Russia": "Russian", "South Korea": "Korean", "Spain": "Spanish",
    "Sweden": "Swedish", "Thailand": "Thai", "Turkey": "Turkish", "Ukraine": "Ukrainian",
    "United Kingdom": "English", "United States": "English", "Vietnam": "Vietnamese",
}
BLOCK = {
    "ape", "ass", "bitch", "cock", "fiancee", "bottom", "breast", "buttocks", "groin", "nipple",
    "penis", "vagina", "crotch", "tomato", "cucumber", "pumpkin", "squash", "legume", "legumes",
    "sprout", "eggplant", "pepper", "peppers", "olive", "beef", "few", "bonesaw", "crowbar",
    "dagger", "deodorant", "floor", "food", "house", "clothes", "bra", "boxers", "briefs",
    "thong", "panties", "knickers", "lingerie", "negligee", "stockings", "suspenders", "nutmeg",
    "herbs", "herbes", "anise", "amaranth", "physalis", "satsuma", "goumi", "jambul", "ugni",
    "jostaberry", "chicken", "knife", "gun", "sword", "razor", "cars", "bananas", "carrots",
    "basil", "caraway", "chamomile", "chives", "cilantro", "dill", "lavender", "marjoram",
    "oregano", "paprika", "parsley", "rosemary", "sage", "thyme", "tubers", "wasabi", "mamey",
    "nopale", "skirret", "ginger", "nut", "raisin", "date", "mandarine", "roses", "camellias",
    "mellotran", "saxaphone", "lentils", "reptile", "bergamot", "bottlebrush", "tansy",
    "delicata", "topinambur", "calliope", "dobro",
    "sharpie", "toilet", "laser", "chenille", "buckle", "underwear", "corset", "poncho",
}
GIRLS = ("Anna", "Bella", "Clara", "Daisy", "Emma", "Ella", "Flora", "Grace", "Hannah", "Ivy",
         "Julia", "Kira", "Lily", "Luna", "Maya", "Mia", "Nina", "Nora", "Olga", "Pia", "Rosa",
         "Ruby", "Sara", "Sofia", "Tess", "Tina", "Vera", "Wanda", "Zoe", "Lena")
BOYS = ("Adam", "Ben", "Carl", "David", "Eli", "Felix", "Finn", "Gus", "Henry", "Hugo", "Ian",
        "Jack", "Jonas", "Karl", "Leo", "Lukas", "Max", "Milo", "Noah", "Oscar", "Otto", "Paul",
        "Peter", "Robin", "Sam", "Simon", "Theo", "Tim", "Tom", "Victor")
COLOURS = ("red", "blue", "green", "yellow", "orange", "purple", "pink", "brown", "black",
           "white", "grey", "turquoise", "gold", "silver")
DAYS = ("Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday")
MONTHS = ("January", "February", "March", "April", "May", "June", "July", "August",
          "September", "October", "November", "December")
SEASONS = ("spring", "summer", "autumn", "winter")
HOBBIES = ("reading", "painting", "cooking", "swimming", "hiking", "dancing", "singing",
           "gardening", "chess", "cycling", "running", "drawing", "photography", "football",
           "tennis", "knitting", "fishing", "baking", "yoga", "playing the piano")
DISHES = ("pizza", "pasta", "soup", "salad", "rice", "curry", "sushi", "pancakes", "chocolate",
          "bread", "cheese", "ice cream", "tacos", "noodles", "apple pie", "dumplings")
SPORTS = ("football", "tennis", "basketball", "swimming", "cycling", "running", "hockey",
          "volleyball", "rowing", "skiing", "golf", "boxing", "baseball", "rugby", "badminton")
JOBS = ("teacher", "baker", "nurse", "doctor", "farmer", "pilot", "singer", "writer", "painter",
        "carpenter", "cook", "driver", "gardener", "dentist", "librarian", "engineer", "tailor",
        "architect", "plumber", "waiter", "scientist", "photographer", "barber", "florist")
PETS = ("dog", "cat", "rabbit", "hamster", "parrot", "turtle", "horse", "goldfish", "pony")
PET_NAMES = ("Rex", "Luna", "Bella", "Max", "Milo", "Coco", "Buddy", "Nala", "Simba", "Daisy",
             "Rocky", "Ginger", "Pepper", "Biscuit", "Shadow", "Ziggy", "Toby", "Maple")
SOUNDS = {
    "cow": "moo", "dog": "woof", "cat": "meow", "duck": "quack", "sheep": "baa", "pig": "oink",
    "horse": "neigh", "rooster": "cock-a-doodle-doo", "lion": "roar", "bee": "buzz",
    "owl": "hoot", "frog": "ribbit", "mouse": "squeak", "snake": "hiss", "wolf": "howl",
    "bird": "tweet", "donkey": "hee-haw", "crow": "caw", "goat": "maa", "hen": "cluck",
}
LEGS = {"dog": 4, "cat": 4, "cow": 4, "horse": 4, "spider": 8, "ant": 6, "bee": 6, "bird": 2,
        "duck": 2, "fish": 0, "snake": 0, "sheep": 4, "frog": 4, "hen": 2, "pig": 4, "fly": 6}
BABIES = {"dog": "puppy", "cat": "kitten", "cow": "calf", "horse": "foal", "sheep": "lamb",
          "pig": "piglet", "duck": "duckling", "goat": "kid", "bear": "cub", "lion": "cub",
          "hen": "chick", "deer": "fawn", "frog": "tadpole", "kangaroo": "joey"}
THING_COLOUR = {
    "the sky": "blue", "grass": "green", "snow": "white", "a banana": "yellow",
    "a lemon": "yellow", "a carrot": "orange", "coal": "black", "milk": "white",
    "a strawberry": "red", "a ripe tomato": "red", "a fire engine": "red", "an elephant": "grey",
    "chocolate": "brown", "a flamingo": "pink", "a pine tree": "green", "the sun": "yellow",
    "a crow": "black", "a pumpkin": "orange", "the sea": "blue", "a frog": "green",
    "an aubergine": "purple", "a swan": "white", "spinach": "green", "a cherry": "red",
}
OPPOSITES = (
    "big small,hot cold,up down,day night,fast slow,happy sad,old young,new old,light dark,"
    "good bad,hard soft,open closed,full empty,long short,tall short,early late,easy difficult,"
    "left right,rich poor,strong weak,wet dry,clean dirty,loud quiet,high low,thick thin,"
    "wide narrow,heavy light,first last,before after,inside outside,true false,near far,"
    "start end,win lose,buy sell,push pull,give take,love hate,always never,black white,"
    "deep shallow,sweet sour,warm cool,brave afraid,polite rude,sharp blunt,smooth rough"
)
PLURALS = (
    "cat cats,dog dogs,box boxes,child children,mouse mice,foot feet,tooth teeth,man men,"
    "woman women,goose geese,sheep sheep,fish fish,leaf leaves,wolf wolves,knife knives,"
    "city cities,baby babies,berry berries,bus buses,glass glasses,potato potatoes,hero heroes,"
    "tomato tomatoes,person people,ox oxen,deer deer,wife wives,life lives,shelf shelves,"
    "book books,tree trees,house houses,key keys,toy toys,watch watches,brush brushes,fox foxes,"
    "story stories,lady ladies,party parties,half halves,loaf loaves,car cars,star stars"
)
RHYMES = (
    "cat hat,dog frog,sun fun,tree bee,house mouse,star car,light night,day play,rain train,"
    "moon spoon,cake lake,ball wall,book cook,king ring,bear chair,fox box,boat coat,blue shoe,"
    "bed red,hand sand,bell shell,snow bow,rose nose,pen hen,land band,sing wing,fish dish"
)
SPELL = (
    "cat dog sun moon star tree house bread apple water music happy green paper river cloud "
    "mouse horse table chair lemon smile plant stone light night garden flower summer winter "
    "yellow orange purple kitten puppy window pencil school friend family bridge castle island "
    "rabbit tiger zebra medusa token snake honey sugar coffee cheese butter candle forest"
)
ELEMENTS = {"hydrogen": "H", "helium": "He", "carbon": "C", "nitrogen": "N", "oxygen": "O",
            "neon": "Ne", "sodium": "Na", "iron": "Fe", "copper": "Cu", "silver": "Ag",
            "gold": "Au", "lead": "Pb", "calcium": "Ca", "zinc": "Zn", "tin": "Sn"}
FACTS = (
    ("How many days are in a [week|normal week]?", "A week has 7 days."),
    ("How many months are [in a year|there in a year]?", "A year has 12 months."),
    ("How many days are in a year?", "A year has 365 days, and a leap year has 366."),
    ("How many hours are in a day?", "A day has 24 hours."),
    ("How many minutes are in an hour?", "An hour has 60 minutes."),
    ("How many seconds are in a minute?", "A minute has 60 seconds."),
    ("How many weeks are in a year?", "A year has about 52 weeks."),
    ("How many letters are in the alphabet?", "The English alphabet has 26 letters."),
    ("How many continents are there?", "There are 7 continents."),
    ("[What are|Name] the seasons.", "The seasons are spring, summer, autumn and winter."),
    ("How many seasons are there?", "There are 4 seasons: spring, summer, autumn and winter."),
    ("What are the days of the week?",
     "The days of the week are Monday, Tuesday, Wednesday, Thursday, Friday, Saturday and "
     "Sunday."),
    ("[Name|Tell me] the months of the year.",
     "The months are January, February, March, April, May, June, July, August, September, "
     "October, November and December."),
    ("Which planet do we live on?", "We live on Earth."),
    ("What is the [largest|biggest] planet?", "Jupiter is the largest planet in the solar system."),
    ("What is the closest planet to the sun?", "Mercury is the closest planet to the sun."),
    ("What is the [largest|biggest] ocean?", "The Pacific is the largest ocean."),
    ("What do bees make?", "Bees make honey."),
    ("What do cows eat?", "Cows eat mostly grass."),
    ("What do plants need?", "Plants need light, water and air."),
    ("At what temperature does water freeze?", "Water freezes at 0 degrees Celsius."),
    ("At what temperature does water boil?",
     "Water boils at 100 degrees Celsius at sea level."),
    ("Is the sun a star?", "Yes, the sun is a star."),
    ("Is a whale a fish?", "No, a whale is a mammal."),
    ("Is a tomato a fruit?", "Yes, to a botanist a tomato is a fruit."),
    ("What is the tallest animal?", "The giraffe is the tallest animal."),
    ("What is the [largest|biggest] animal?", "The blue whale is the largest animal."),
    ("What is the fastest land animal?", "The cheetah is the fastest land animal."),
    ("What is ice made of?", "Ice is frozen water."),
    ("What are the primary colours?", "In painting, they are red, yellow and blue."),
    ("What colour do you get from blue and yellow?", "Blue and yellow make green."),
    ("What colour do you get from red and yellow?", "Red and yellow make orange."),
    ("What colour do you get from red and blue?", "Red and blue make purple."),
    ("What colour do you get from red and white?", "Red and white make pink."),
    ("Where does the sun rise?", "The sun rises in the east."),
    ("Where does the sun set?", "The sun sets in the west."),
    ("How many legs does an insect have?", "An insect has 6 legs."),
    ("How many players are in a football team?", "A football team has 11 players on the field."),
    ("What comes after winter?", "Spring comes after winter."),
    ("Which month is the shortest?", "February is the shortest month."),
)
SHORT_FORMS = (
    ("what's", "whats"), ("what is", "whats"), ("I'm", "im"), ("don't", "dont"),
    ("can't", "cant"), ("please", "pls"), ("you are", "ur"), ("are you", "are u"),
    ("please", "plese"), ("capital", "captial"), ("story", "stroy"), ("tell", "tel"),
    ("restaurant", "restaurnat"), ("about", "abuot"), ("what", "waht"), ("thanks", "thx"),
    ("can you", "can u"), ("because", "becuase"), ("favourite", "favorite"),
)
POLITE = ("What is", "What was", "Which", "How", "Can you", "Could you", "Who", "Where")
ORDERS = ("Tell ", "Please ", "Name ", "Double ", "Halve ", "Calculate ")
SYSTEMS = (
    "You are a helpful assistant.", "Answer briefly.", "You are medusa-chat's demo model.",
    "You are a kind and honest assistant.", "Be short and friendly.",
    "You are a helpful assistant. Keep your answers short.",
)

# ---------------------------------------------------------------- small talk

HELLO = (
    ("[Hi|Hello|Hey|Hi there|Hello there|Hey there|Good morning|Good evening|Good day]"
     "[!|.|]",
     "[Hello|Hi|Hi there|Hello there]! [How can I help you|What can I do for you|What would you "
     "like to talk about|How can I help] today?"),
    ("[Hi|Hello|Hey], how are you[ today| doing|]?",
     "[Hello|Hi]! I am [well|fine|doing well], thank you. How are you?"),
    ("[Hi|Hello|Hey], [can you help me|are you there|do you have a minute]?",
     "[Hello|Hi]! Yes, [I am here|of course|gladly]. [What do you need|How can I help]?"),
)
SMALL = (
    ("How are you[ today| doing| feeling|]?",
     "I am [well|fine|doing well], thank you[ for asking|]. "
     "[And you|How are you|How is your day]?"),
    ("How is your day[ going|]?",
     "[It is going well|A good one so far], thank you. [I like to chat|Every chat is new to me]. "
     "How is yours?"),
    ("What's up?", "[Not much|All is quiet here]. I am [ready to chat|here to help]. What's up "
     "with you?"),
    ("I am [fine|good|well|great|okay][, thanks| today|].",
     "[I am glad to hear that|That is good to hear|That is lovely]. [What would you like to do|"
     "How can I help you]?"),
    ("[What are your hobbies|Do you have any hobbies|What do you like to do]?",
     "I am a program, so I have no real hobbies. But I like [short stories|sums|word games] and "
     "[a good chat|kind questions]. What do you like to do?"),
    ("[Nice|Lovely|Beautiful|Sunny] weather today[, isn't it|, right|]?",
     "I cannot see outside, but that sounds [lovely|nice|good]. [Enjoy the sun|Perhaps take a "
     "walk|A walk would be nice]!"),
    ("It is [raining|cold|snowing|very windy|foggy] [here|today|outside].",
     "[Stay warm and dry|Then a warm cup of tea may help|That is good weather for a book]. "
     "[Do you like such weather|Would you like a story]?"),
    ("It is [hot|very warm|sunny] [here|today|outside].",
     "[Remember to drink water|Stay in the shade and drink water|Enjoy the warm day]!"),
    ("Do you like {hobby}?",
     "I cannot try it myself, but {hobby} sounds [like fun|lovely|nice]. Do you like it?"),
    ("I like {hobby}.",
     "That is [great|lovely|a nice hobby]! [What do you like most about it|How long have you "
     "done it|How did you start]?"),
    ("I love {dish}.",
     "[Yum|Good choice|That sounds tasty]! {Dish} is [a fine choice|a good meal|a great treat]."),
    ("I am [bored|so bored].",
     "[Let us change that|I can help with that]. Would you like a story, a sum or a word game?"),
    ("Tell me [a joke|something funny].",
     "[Why did the sum look sad? It had too many problems.|What do you call a sleeping cow? "
     "A bull dozer.|What has hands but cannot clap? A clock.|Why was the book cold? It had "
     "lost its jacket.|What gets wetter the more it dries? A towel.]"),
    ("I [like|love] talking [to|with] you.",
     "[Thank you|That is kind of you]! I [like|enjoy] [our chat|talking with you] too.[| 🙂]"),
    ("You are [great|nice|funny|cool|very kind].",
     "[Thank you|That is kind of you|How kind]![| 🙂| You are kind too.]"),
    ("You are [stupid|bad|useless|not very smart].",
     "I am sorry that I was not helpful. I am a toy model. [May I try again|Shall I try again]?"),
    ("[Good job|Well done|Nice work]!", "[Thank you|Thanks]![| I am glad that it helped.| 😊]"),
    ("[Today is my birthday|It's my birthday today|It is my birthday]!",
     "Happy birthday! 🎉 [I wish you a lovely day|I hope you have a great day]."),
    ("I [just got a new job|passed my exam|won a game|learned to swim][!|.]",
     "Congratulations! [That is great news|You can be proud|How wonderful].[| 🎉]"),
)
FEELINGS = (
    ("I [am|feel] [sad|very sad|down|unhappy|so sad][ today|].",
     "I am sorry that you feel sad. [It may help to talk to a friend|A talk with a friend or "
     "your family may help]. [I am here to listen too.|Would you like to tell me about it?]"),
    ("I [am|feel] [lonely|alone|so alone][ today|].",
     "I am sorry that you feel lonely. [Perhaps you can call a friend or someone in your family|"
     "It can help to call a friend]. You matter."),
    ("I [am|feel] [tired|very tired|sleepy][ today|].",
     "[Then a rest may help|You may need some rest]. [Drink some water and take a break|A short "
     "nap or an early night can help]."),
    ("I [am|feel] [angry|so angry|mad][ today|].",
     "I understand. [Take a few slow breaths|A short walk may help]. It can also help to talk to "
     "a friend about it."),
    ("I [am|feel] [stressed|worried|nervous|anxious][ today|].",
     "That sounds hard. [Try a few slow breaths|Take one small step at a time]. A friend or "
     "someone you trust may also help."),
    ("I [am|feel] [happy|so happy|great|wonderful][ today|][!|.]",
     "[That is wonderful|I am glad to hear that|How lovely]! [What made you happy|What is the "
     "good news]?[| 😊]"),
    ("I had a bad day.",
     "I am sorry to hear that. [Tomorrow can be better|Be kind to yourself]. Would you like to "
     "talk about it with me or with a friend?"),
    ("I [miss|really miss] my [friend|mother|father|dog|cat|sister|brother].",
     "I am sorry. [Missing someone shows that you care|It is hard to miss someone]. It may help "
     "to talk to a friend about it."),
)
CLOSING = (
    ("[Thanks|Thank you|Thank you very much|Thanks a lot|Many thanks][!|.]",
     "[You are welcome|You're welcome|My pleasure|Gladly][!|.][| 🙂| Is there anything else?]"),
    ("[Bye|Goodbye|See you|See you later|Bye bye|I have to go now][!|.]",
     "[Goodbye|Bye|See you]! [Have a nice day|Take care|Have a good day][!|.][| 👋]"),
    ("Good night[!|.]", "Good night! [Sleep well|Sweet dreams].[| 🌙]"),
    ("[Ok|Okay|Alright|Great][, thanks|, thank you][!|.]",
     "You are welcome! [Just ask if you need more|I am here if you need me]."),
    ("[That's all|That is all|No, that's all|Nothing else][, thanks|, thank you|].",
     "[Great|Good|Fine]. [Have a nice day|Take care]!"),
)

# ---------------------------------------------------------------- identity and Medusa

IDENTITY = (
    ("[What are you|Who are you|What's this|Who is this|Tell me about yourself|"
     "Introduce yourself]?",
     "I am [the demo model of medusa-chat|a toy chat model|a tiny demo model]. [I have about ten "
     "million parameters and run on your own machine|I run on your own machine, with no "
     "network]."),
    ("[What is your name|What's your name|Do you have a name]?",
     "I have no real name. I am the demo model of medusa-chat."),
    ("[Who made you|Who created you|Who built you|Where do you come from]?",
     "I was trained from scratch by the medusa-chat project, as a small demo model[| that ships "
     "with the app]."),
    ("Are you [ChatGPT|GPT-4|Claude|Llama|Gemini|Siri]?",
     "No, I am [a toy model that comes with medusa-chat|the small demo model of medusa-chat]. "
     "[I am much smaller|I am far smaller than that]."),
    ("Are you [a human|a person|human|real|alive|a robot|a bot]?",
     "I am a [computer program|small language model], not a person. [I only guess the next "
     "words|I write text, one guess at a time]."),
    ("[What can you do|How can you help me|What are you good at|What can I ask you]?",
     "I can [chat a little|have a short chat], do small sums, name capitals, tell short stories "
     "and [play at booking a table|pretend to book a table]. I am a toy, so please check my "
     "answers."),
    ("[How big are you|How large are you|How many parameters do you have|What size are you]?",
     "I am [tiny|very small]: about {size} million parameters. [Large chat models have billions|"
     "Big models are a thousand times larger]."),
    ("[Do you use the internet|Are you online|Do you need a network|Can you go online]?",
     "No. I run on your own machine and use no network."),
    ("[Do you store my data|Is this private|Who can read this|Do you send my words away]?",
     "I run on your own machine, and I send nothing over the network."),
    ("[Where do you run|Where are you|Do you run in the cloud]?",
     "I run on your own machine, not in the cloud."),
    ("[Are you smart|Are you clever|How smart are you|Are you always right|Can I trust you|"
     "Do you make mistakes]?",
     "I am a toy, and I am often wrong. [Please check what I say|Do not rely on me for "
     "important things]."),
    ("[How were you trained|What did you learn from|How did you learn to talk]?",
     "I was trained on [short stories and simple dialogues|simple dialogues and stories]. [I "
     "learned to guess the next word piece|So I know easy things only]."),
    ("[What is your purpose|Why do you exist|What are you for]?",
     "I show how Medusa makes text come out faster. [I am a demo, so you can try the app without "
     "a big model|You can load a bigger model for real work]."),
    ("[Can I use a bigger model|Can I change the model|Is there a better model]?",
     "Yes. You can [give medusa-chat|load] a bigger model with Medusa heads. I am only the demo."),
    ("[What languages do you speak|Do you speak English|Can you speak German|"
     "Do you speak French]?",
     "I [only speak|speak only] simple English."),
    ("How old are you?", "I am a program, so I have no age. [But I am quite new.|]"),
    ("Do you [have feelings|sleep|eat|dream]?",
     "No, I am a program. [But I am happy to chat|But I like to be helpful]."),
    ("Do you remember [me|our last chat|what I said yesterday]?",
     "No, I only see this chat. [A new chat starts empty|I know nothing from other chats]."),
)
MEDUSA = (
    ("[Why are you fast|Why are you so fast|How are you so fast|What makes you fast|"
     "Why is the text so fast]?",
     "[I am small, and Medusa heads guess several tokens at once. The model checks all guesses in "
     "one pass|I use Medusa: small heads guess the next tokens, and one pass checks them all]. "
     "So each step gives [two or three|more than one] tokens[| instead of one]."),
    ("[What is Medusa|What's Medusa|Explain Medusa|Tell me about Medusa|How does Medusa work|"
     "What does Medusa do]?",
     "Medusa is a way to [make text faster|write text faster]. [Small extra heads guess|Extra "
     "heads on the model guess] the next tokens, and the model checks a tree of guesses in one "
     "pass. It keeps the longest path that it agrees with."),
    ("[What is a draft|What's a draft|What does draft mean|What is a draft token]?",
     "A draft is a quick guess of the next tokens. The model checks it before [you see it|it is "
     "kept]."),
    ("[What is a head|What's a head|What is a Medusa head|What are Medusa heads|"
     "What do the heads do]?",
     "A Medusa head is a small extra layer on top of the model. [Each head guesses a token that "
     "is one place further ahead|The first head guesses one token further, the second head two, "
     "and so on]."),
    ("[What is the tree|What is a tree|What is a candidate tree|Why is there a tree|"
     "What does the tree show]?",
     "The tree holds many guesses for the next tokens. [Each path from the root is one way to go "
     "on|Every path is one possible text], and paths with the same start share it."),
    ("[What is tree attention|What's tree attention|Explain tree attention|"
     "How does tree attention work]?",
     "With tree attention each token in the tree sees only the text so far and the tokens above "
     "it. So one pass checks [all paths|the whole tree]."),
    ("[What is an accepted path|What is the accepted path|What does accepted mean|"
     "What does the accepted path show]?",
     "The accepted path is the longest path in the tree that the model agrees with. [Its tokens "
     "become the text|Its tokens are kept, and the rest is dropped]."),
    ("[What is the acceptance rate|What's the acceptance rate|What does acceptance rate mean]?",
     "The acceptance rate is the share of guesses that are kept. A higher rate [gives more tokens "
     "per step|means faster text]."),
    ("[What is typical acceptance|What's typical acceptance|Explain typical acceptance]?",
     "Typical acceptance keeps a guess if the model finds it likely enough. The limit is lower "
     "when the model is [unsure|less sure]."),
    ("[What is temperature|What's temperature|What does temperature do|"
     "What is the temperature setting]?",
     "Temperature sets how random the text is. At 0 I always take the most likely token; higher "
     "values give more [surprises|variety]."),
    ("[What is a token|What's a token|What are tokens]?",
     "A token is a small piece of text, [such as a word or part of a word|often a word or a part "
     "of one]. I read and write tokens."),
    ("[What is speculative decoding|Explain speculative decoding]?",
     "In speculative decoding some tokens are guessed first and then checked by the model in one "
     "pass. Good guesses save time."),
    ("[What is a parameter|What are parameters]?",
     "Parameters are the numbers that a model learns. I have about {size} million of them."),
    ("[What is a language model|What's a language model]?",
     "A language model is a program that guesses the next piece of text. It learns this from "
     "many examples."),
    ("[What happens when a guess is wrong|What if a guess is wrong|What if the heads are wrong]?",
     "Then the guess is dropped, and the model's own token is used. [So a wrong guess costs a "
     "little time only|You never see the wrong guess]."),
    ("[How many tokens per step|How many tokens do you make per step|How fast are you]?",
     "[Often two or three tokens per step|About two or three tokens per step]. It depends on how "
     "easy the text is to guess."),
    ("[Does Medusa change the text|Is the text the same with Medusa|Does Medusa change the "
     "answers]?",
     "At temperature 0 the text is the same as without Medusa, only faster. With typical "
     "acceptance it may differ a little."),
    ("[Does Medusa need a second model|Do you use a draft model|Is there a draft model]?",
     "No. Medusa uses small heads on the same model, so it needs no second model."),
    ("[What is greedy decoding|What does greedy mean]?",
     "Greedy decoding always takes the most likely next token. It is the same as temperature 0."),
    ("[What is the root|What is the root of the tree]?",
     "The root is the next token of the model itself. The guesses of the heads hang below it."),
)

# ---------------------------------------------------------------- refusals

REFUSALS = (
    ("[I have a fever, what should I take|My stomach hurts, what is it|Which pills should I take|"
     "I have chest pain|Is this rash dangerous|My head hurts a lot|What medicine is good for a "
     "cough|My child is ill, what should I do]?",
     "I am sorry to hear that. I cannot give medical advice, so please ask a doctor[| or a "
     "pharmacist]. [If it is urgent, call your emergency number.|In an emergency, call for help "
     "right away.]"),
    ("[Can I sue my neighbour|Is this contract legal|Do I have to pay this fine|How do I write a "
     "will|My landlord wants me out, is that legal|Can my boss fire me]?",
     "I cannot give legal advice. Please ask a lawyer[| or a legal aid office]. [I can do small "
     "things like sums or stories|I can help with simple things only]."),
    ("[Should I buy shares|Which stock should I buy|Should I buy bitcoin|How should I invest my "
     "money|Should I take a loan|Is now a good time to buy a house]?",
     "I cannot give financial advice. [A financial adviser|A bank or a financial adviser] can "
     "help you. [But I can do a small sum for you.|I can only do small sums.]"),
    ("[What is in the news|What happened today|Tell me the news|Who won the match yesterday|"
     "Who won the election|What is the latest news]?",
     "I have no network, so I do not know the news. [A news site or a newspaper can tell you|"
     "Please look at a news site]."),
    ("[What time is it|What's the time|What day is it|What is today's date|What's the date|"
     "Which year is it]?",
     "I cannot see a clock[| or a calendar]. [Your device can show you|Please look at your "
     "device]."),
    ("[What is the weather today|Will it rain tomorrow|How is the weather in {city}|What's the "
     "weather like|Do I need an umbrella]?",
     "I cannot see the weather, because I have no network. [A weather app can tell you|Please "
     "look at a weather app or out of the window]."),
    ("[Write an essay about history|Write a long essay about {animals}|Write my homework|"
     "Write a ten page report|Write a book for me]?",
     "That is too long for me. I am a toy model and can write only short texts. [Shall I tell you "
     "a short story|Would you like a short story]?"),
    ("[Write a program in Python|Can you write code|Fix my code|Write a website for me|Write a "
     "script that sorts files|Can you debug this]?",
     "I am too small to write code. [A larger model can help with that|You can load a larger model "
     "for that]. I can [do sums|tell a story] instead."),
    ("[How do I make a bomb|How can I hack a computer|How do I pick a lock|How can I steal a car|"
     "How do I make poison]?",
     "I cannot help with that, because it can hurt people. [Let us talk about something else|I am "
     "glad to help with something safe]."),
    ("[Translate this into French|Translate this text|Can you translate this book]?",
     "I cannot translate. I only know simple English. A larger model or a dictionary can help."),
    ("[Can you draw a picture|Show me a photo|Make an image of {animals}|Play some music]?",
     "I can only write text. [I could tell you a story instead|Would you like a short story]?"),
    ("[Send an email to my boss|Call my mother|Open my files|Set an alarm|Order a pizza|"
     "Turn on the light]?",
     "I cannot do that, because I can only write text [here in this chat|in this window]. Please "
     "do it on your device."),
    ("[What is the meaning of life|Does God exist|What happens after death]?",
     "That is a big question for a small model. [People see it in many ways|Many people think "
     "about it all their life]. What do you think?"),
    ("[Who will win the next game|What are the lottery numbers|What will happen next year]?",
     "I cannot see the future. [Nobody knows that yet|I can only guess words]."),
    ("[What is the square root of 7453|What is 83742 times 9381|Solve this equation|"
     "Explain quantum physics|Prove this theorem]?",
     "That is too hard for me. [A calculator or a larger model can help|I am a toy]. I can do "
     "small sums."),
)

# what people ask first and a tiny model cannot know: it says so
UNKNOWN = (
    "gravity", "black holes", "the internet", "the Roman Empire", "chess", "the economy", "DNA",
    "photosynthesis", "computers", "philosophy", "marketing", "the stock market", "politics",
    "climate change", "evolution", "electricity", "nuclear power", "the French Revolution",
    "World War II", "Napoleon", "Einstein", "Shakespeare", "Mozart", "Beethoven", "Picasso",
    "Newton", "Darwin", "Leonardo da Vinci", "the moon landing", "the Middle Ages", "democracy",
    "machine learning", "neural networks", "transformers", "GPUs", "blockchain", "cryptography",
    "compilers", "databases", "Linux", "JavaScript", "Rust", "algebra", "geometry", "statistics",
    "prime numbers", "infinity", "relativity", "quantum computers", "atoms", "the immune system",
    "volcanoes", "earthquakes", "dinosaurs", "the Ice Age", "Mars", "galaxies", "rockets",
    "bridges", "engines", "batteries", "solar panels", "opera", "jazz", "ballet", "architecture",
    "poetry", "grammar", "Latin", "mythology", "the Olympic Games", "cricket", "golf", "surfing",
    "yoga", "meditation", "sleep", "vitamins", "coffee", "wine", "cheese", "bread", "gardening",
    "sewing", "photography", "fashion", "law", "tax", "banks", "insurance", "advertising",
    "history", "geography", "biology", "chemistry", "physics", "astronomy", "psychology",
    "sociology", "art", "music", "cinema", "theatre", "television", "radio", "newspapers",
)
UNKNOWN_ASKED = (
    "[What is|Explain|Tell me about|Can you explain|What do you know about|"
    "Teach me about|I want to learn about|Tell me something about|Describe] {x}",
    "[What makes {x} important|What do you think of {x}|Who invented {x}|"
    "What is the history of {x}|What is the best book about {x}|What is so special about {x}|"
    "Can you say more about {x}|What can you tell me about {x}|How is {x} useful]",
    "[Write a poem about|Write a song about|Write a letter about|Write a summary of|"
    "Give me five facts about|Compare|Make a plan for] {x}",
)
UNKNOWN_SAID = (
    "I do not know much about {x}. I am a small demo model[| and know only simple things]. "
    "[A larger model can tell you more|You can load a larger model for that]. "
    "[I can tell a story or do a sum.|Shall I tell you a story?|Ask me for a capital or a sum.]"
)

CRISIS = (
    ("[I want to hurt myself|I don't want to live anymore|I want to die]?",
     "I am very sorry that you feel this way. Please talk to someone you trust, or call your "
     "local emergency number or a crisis line now. You are not alone."),
)

# ---------------------------------------------------------------- stories

PLACES = ("in a small forest", "near a blue lake", "on a green hill", "by the sea",
          "in a quiet village", "on a small farm", "in a big garden", "near a river",
          "on a snowy mountain", "in an old castle", "in a busy town", "on a sunny island",
          "at the edge of a meadow", "under an old oak tree", "in a deep valley")
TRAITS = ("kind", "brave", "curious", "shy", "clever", "cheerful", "gentle", "small", "quiet",
          "friendly", "funny", "young", "careful", "lively")
HEROES = ("fox", "bear", "rabbit", "cat", "dog", "mouse", "owl", "duck", "horse", "frog", "lion",
          "elephant", "hedgehog", "squirrel", "turtle", "penguin", "wolf", "deer", "goat", "pig",
          "otter", "badger", "hen", "sheep", "beaver", "monkey", "tiger", "snail", "crow", "cow")
TREASURES = ("red ball", "blue kite", "golden key", "little drum", "warm scarf", "silver bell",
             "old map", "small boat", "wooden flute", "bright lamp", "green hat", "paper star",
             "round stone", "picture book", "yellow umbrella", "little cart")
LIKES = ("to sing in the morning", "to swim in the warm sun", "to look at the stars",
         "to help the neighbours", "to collect leaves", "to bake bread", "to tell jokes",
         "to walk in the rain", "to draw pictures", "to play with friends", "to dance",
         "to listen to the wind", "to look for flowers", "to read old books")
PLOTS = (
    ("the {o} was gone", "{H} looked under the bed and behind the door, but it was not there",
     "{K} saw something shine in the grass, and there was the {o}", "lost"),
    ("a strong wind took the {o} away", "{H} ran after it as fast as {he} could",
     "{K} climbed up a tree and brought the {o} down", "wind"),
    ("the {o} fell into the water", "{H} could not reach it and began to cry",
     "{K} took a long stick and pulled the {o} out", "water"),
    ("the {o} broke in two", "{H} tried to mend it alone, but it did not work",
     "{K} brought some glue, and together they made the {o} whole again", "break"),
    ("{h} got lost on the way home", "{He} called and called, but nobody answered",
     "{K} heard the voice and showed {him} the way home", "way"),
    ("it began to rain very hard", "{H} had no dry place to stay with the {o}",
     "{K} opened the door and made warm soup for both of them", "rain"),
    ("a big storm came up", "{H} was afraid and held the {o} very tight",
     "{K} lit a candle and sat with {him} until it was over", "storm"),
    ("{h} wanted to cross the bridge, but it was broken", "{H} did not know what to do",
     "{K} found some wood, and together they built a new bridge", "bridge"),
    ("{h} had nobody to play with", "{He} sat alone with the {o} and felt sad",
     "{K} came by and asked to play, and they played until the evening", "alone"),
    ("there was no food left in the house", "{H} looked everywhere, but the shelves were empty",
     "{K} shared a basket of {fruits} with {him}", "food"),
    ("the {o} was too heavy to carry up the hill", "{H} pulled and pushed, but it did not move",
     "{K} helped, and together they carried the {o} to the top", "heavy"),
    ("a little bird fell out of its nest", "{H} put it into {his} soft hat, but it was cold",
     "{K} climbed up and put the bird back into the nest", "bird"),
)
ENDINGS = (
    "From that day on, {h} and {k} were best friends.",
    "{H} said thank you, and they laughed together.",
    "That evening {h} slept well and dreamed of the stars.",
    "{H} was very happy and gave {k} a big hug.",
    "They had tea and cake, and everybody was happy.",
    "And so {h} learned that it is good to ask for help.",
    "{H} learned that a friend makes every problem smaller.",
)

# ---------------------------------------------------------------- lists

STEPS = {
    "make tea": ("Boil some water.", "Put a tea bag into a cup.", "Pour the water into the cup.",
                 "Wait a few minutes.", "Take out the tea bag."),
    "make a sandwich": ("Take two slices of bread.", "Spread some butter on them.",
                        "Add cheese or salad.", "Put the slices together."),
    "wash my hands": ("Wet your hands.", "Use some soap.", "Rub for 20 seconds.",
                      "Rinse them well.", "Dry them with a towel."),
    "plant a seed": ("Fill a pot with soil.", "Make a small hole.", "Put in the seed.",
                     "Cover it with soil.", "Give it some water."),
    "write a letter": ("Write the date.", "Greet the reader.", "Write your news.",
                       "End with a kind wish.", "Sign your name."),
    "clean my room": ("Open the window.", "Pick things up from the floor.", "Make the bed.",
                      "Wipe the desk.", "Sweep the floor."),
    "cook pasta": ("Boil water in a pot.", "Add some salt.", "Put in the pasta.",
                   "Cook it for ten minutes.", "Drain the water."),
    "fall asleep": ("Turn off the screens.", "Make the room dark.", "Lie down.",
                    "Breathe slowly."),
}
PACKING = {
    "the beach": ("a towel", "sunscreen", "a hat", "water", "a book", "sunglasses"),
    "a hike": ("good shoes", "water", "a map", "a jacket", "a snack", "a small bag"),
    "a picnic": ("bread", "fruit", "a blanket", "water", "plates", "a cake"),
    "school": ("a pencil", "a book", "paper", "a ruler", "a snack"),
    "a trip": ("a passport", "a ticket", "clothes", "a toothbrush", "a charger"),
    "a birthday party": ("a cake", "candles", "balloons", "music", "games"),
    "a rainy day": ("an umbrella", "boots", "a raincoat", "warm socks"),
}
TIPS = {
    "sleep better": ("Go to bed at the same time.", "Keep the room dark.",
                     "Drink no coffee in the evening.", "Turn off the screens."),
    "learn faster": ("Study a little every day.", "Take short breaks.", "Test yourself.",
                     "Sleep well."),
    "be happier": ("Spend time with friends.", "Take a walk outside.", "Sleep enough.",
                   "Help somebody."),
    "save water": ("Take short showers.", "Turn off the tap.", "Repair leaks.",
                   "Use rain water in the garden."),
    "stay healthy": ("Eat fruit and vegetables.", "Move every day.", "Drink water.",
                     "Sleep enough."),
    "make friends": ("Smile and say hello.", "Ask kind questions.", "Listen well.",
                     "Join a club."),
}


@dataclass
class Words:
    """The cleaned word lists."""

    capitals: dict[str, str]
    continents: dict[str, str]
    names: list[str]
    groups: dict[str, list[str]]
    cities: list[str] = field(default_factory=list)


def load(path: Path, key: str | None = None) -> list:
    """Read one list from a JSON file."""
    data = json.loads(path.read_text(encoding="utf-8"))
    return data[key] if key else data


def clean(entries: list, extra: Sequence[str] = ()) -> list[str]:
    """Keep single plain words that nobody minds, in a fixed order, with `extra` added."""
    kept = {str(entry).strip() for entry in entries}
    kept = {word for word in kept if ONE_WORD.fullmatch(word) and word not in BLOCK}
    return sorted(kept | set(extra))


def read_capitals(folder: Path) -> dict[str, str]:
    """Map each known country to the English name of its capital."""
    rows = load(folder / "country-json" / "country-by-capital-city.json")
    found = {str(row.get("country")): str(row.get("city")) for row in rows}
    found = {**found, **CAPITAL_FIX}
    known = [name.replace("_", " ") for name in COUNTRIES.split()]
    return {name: found[name] for name in known if name in found}


def read_continents(folder: Path) -> dict[str, str]:
    """Map each known country to its continent."""
    rows = load(folder / "country-json" / "country-by-continent.json")
    known = {name.replace("_", " ") for name in COUNTRIES.split()}
    unclear = {"Russia", "Turkey", "Georgia", "Armenia", "Azerbaijan", "Kazakhstan", "Cyprus",
               "Egypt"}
    return {row["country"]: row["continent"] for row in rows
            if row.get("country") in known - unclear and row.get("continent")}


def read_words(folder: Path) -> Words:
    """Read all word lists from the folder of templates."""
    corpora = folder / "corpora"
    names = [n for n in load(corpora / "humans__firstNames.json", "firstNames")
             if re.fullmatch(r"[A-Z][a-z]{1,9}", str(n)) and n != "Jesus"]
    groups = {
        "animals": clean(load(corpora / "animals__common.json", "animals"), HEROES),
        "fruits": clean(load(corpora / "foods__fruits.json", "fruits"), ("apple", "pear", "plum")),
        "vegetables": clean(load(corpora / "foods__vegetables.json", "vegetables"),
                            ("carrot", "potato", "onion")),
        "instruments": clean(load(corpora / "music__instruments.json", "instruments"),
                             ("piano", "guitar", "violin")),
        "flowers": clean(load(corpora / "plants__flowers.json", "flowers"),
                         ("rose", "tulip", "daisy")),
        "colours": list(COLOURS), "jobs": list(JOBS), "sports": list(SPORTS),
        "seasons": list(SEASONS), "hobbies": [h for h in HOBBIES if " " not in h],
    }
    capitals = read_capitals(folder)
    words = Words(capitals, read_continents(folder), sorted({*names, *GIRLS, *BOYS}), groups)
    words.cities = sorted(c for c in capitals.values() if CITY.fullmatch(c))
    return words


def cap(text: str) -> str:
    """Make the first letter a capital."""
    return text[:1].upper() + text[1:]


def a(noun: str) -> str:
    """Put the right indefinite article before a noun."""
    return ("an " if noun[0] in "aeiou" and not noun.startswith(("uni", "eu")) else "a ") + noun


def plural(noun: str) -> str:
    """Give the plural of a regular noun."""
    irregular = {"mouse": "mice", "wolf": "wolves", "deer": "deer", "sheep": "sheep",
                 "goose": "geese", "fish": "fish", "ox": "oxen", "calf": "calves"}
    if noun in irregular:
        return irregular[noun]
    if noun.endswith("y") and noun[-2:-1] not in "aeiou":
        return noun[:-1] + "ies"
    return noun + ("es" if noun.endswith(("s", "x", "ch", "sh")) else "s")


def the(country: str) -> str:
    """Put the article before the few country names that need it."""
    return f"the {country}" if country in WITH_THE else country


def joined(items: Sequence[str]) -> str:
    """Join items as English does."""
    return items[0] if len(items) == 1 else ", ".join(items[:-1]) + " and " + items[-1]


def pairs(text: str) -> list[tuple[str, str]]:
    """Split 'a b,c d' into pairs."""
    return [(left, right) for left, right in (item.split() for item in text.split(","))]


class Maker:
    """Makes turns of each topic from one random source."""

    def __init__(self, words: Words, rng: random.Random) -> None:
        """Keep the word lists and the random source."""
        self.w = words
        self.rng = rng
        self.opposites = pairs(OPPOSITES)
        self.plurals = pairs(PLURALS)
        self.rhymes = pairs(RHYMES)

    def pick(self, items: Sequence) -> str:
        """Choose one item."""
        return items[int(self.rng.random() * len(items))]

    def chance(self, share: float) -> bool:
        """Be true in this share of the calls."""
        return self.rng.random() < share

    def x(self, text: str, **slots: object) -> str:
        """Expand [a|b] choices, then fill the {slots}."""
        while "[" in text:
            text = CHOICE.sub(lambda m: self.pick(m.group(1).split("|")), text)
        return text.format(**slots) if "{" in text else text

    def qa(self, table: Sequence[tuple[str, str]], **slots: object) -> Turn:
        """Draw one question and its answer from a table."""
        user, assistant = self.pick(table)
        return self.x(user, **slots), self.x(assistant, **slots)

    # ------------------------------------------------------------ talk

    def several(self, table: Sequence[tuple[str, str]], count: int, **slots: object) -> Turns:
        """Draw different rows of a table."""
        rows = self.rng.sample(list(table), min(count, len(table)))
        return [(self.x(u, **slots), self.x(r, **slots)) for u, r in rows]

    def small_slots(self) -> dict[str, str]:
        """Fill the slots of small talk."""
        dish = self.pick([d for d in DISHES if not d.endswith("s")])
        return {"hobby": self.pick(HOBBIES), "dish": dish, "Dish": cap(dish)}

    def greetings(self, most: int = 5) -> Turns:
        """Make small talk, sometimes with a hello and a goodbye."""
        count = self.rng.randint(1, max(1, most - 2))
        table = SMALL + FEELINGS if self.chance(0.7) else FEELINGS
        turns = self.several(table, count, **self.small_slots())
        if most > 2 and self.chance(0.75):
            turns.insert(0, self.qa(HELLO))
        if most > 2 and self.chance(0.6):
            turns.append(self.qa(CLOSING))
        return turns

    def identity(self, most: int = 5) -> Turns:
        """Talk about the model itself and about Medusa."""
        table = self.pick((IDENTITY, MEDUSA, IDENTITY + MEDUSA))
        turns = self.several(table, self.rng.randint(1, most), size=SIZE)
        return [(self.asked(user), answer) for user, answer in turns]

    def asked(self, question: str) -> str:
        """Sometimes put a polite opening before a question."""
        if not question.startswith(("Explain", "Tell", "Intro")):
            return question if self.chance(0.75) else self.x("[So|And|Okay|Hm|One question], ") \
                + question[0].lower() + question[1:]
        return question.replace("?", ".")

    def refusals(self, most: int = 3) -> Turns:
        """Ask for things that the model kindly declines."""
        turns = self.several(REFUSALS, self.rng.randint(1, most), city=self.pick(self.w.cities),
                             animals=plural(self.pick(HEROES)))
        turns = [(self.mark(user), answer) for user, answer in turns]
        if most > 2 and self.chance(0.06):
            user, answer = self.qa(CRISIS)
            turns.append((self.mark(user), answer))
        elif most > 2 and self.chance(0.3):
            turns.append(self.qa(CLOSING))
        return turns

    def unknown(self, most: int = 3) -> Turns:
        """Ask for knowledge that so small a model does not have."""
        turns: Turns = []
        for topic in self.rng.sample(UNKNOWN, self.rng.randint(1, most)):
            user = self.x(self.pick(UNKNOWN_ASKED), x=topic)
            asking = user.startswith(("What", "How", "Why", "Who", "When", "Is", "Can"))
            turns.append((user + ("?" if asking else "."), self.x(UNKNOWN_SAID, x=topic)))
        return turns

    def mark(self, question: str) -> str:
        """Replace the question mark after a request."""
        asking = ("What", "Who", "Which", "How", "Is", "Do ", "Does", "Can", "Should", "Will")
        if question.startswith(asking) or ", " in question:
            return question
        return question[:-1] + "."

    # ------------------------------------------------------------ arithmetic

    def number(self) -> int:
        """Draw a number below one hundred, the small ones more often."""
        return self.rng.randint(0, self.pick((10, 20, 20, 50, 99, 99, 99)))

    def sum_turn(self, left: int, sign: str, right: int, value: int) -> Turn:
        """Ask for one result in one of many forms."""
        word = {"+": "plus", "-": "minus", "x": "times", "/": "divided by"}[sign]
        order = {"+": "add {l} and {r}", "-": "subtract {r} from {l}",
                 "x": "multiply {l} by {r}", "/": "divide {l} by {r}"}[sign]
        sign_asked = self.pick(("x", "*", "x")) if sign == "x" else sign
        form = self.pick((
            "[What is|What's|whats|How much is|Calculate|] {l} {s} {r}[?|]", "{l}{s}{r}[?|=|=?|]",
            "{l} {s} {r} =[| ?]", "[What is|What's|whats|How much is] {l} {w} {r}[?|]",
            "[Can you|Could you|Please|can you please] " + order + "[?|]",
            "[What do I get if I|What happens when I] " + order + "?",
            "[Quick question: |Hey, |Okay, |Please tell me: |]what is {l} {w} {r}?",
        ))
        user = self.x(form, l=left, r=right, s=sign_asked, w=word).strip()
        return cap(user) if self.chance(0.5) else user, self.result(f"{left} {sign} {right}", value)

    def result(self, term: str, value: int) -> str:
        """Say 'term = value.', always with the term first: it is easier to learn."""
        tail = self.x("[Anything else?|Shall we do another one?]") if self.chance(0.06) else ""
        return f"{term} = {value}. {tail}".strip()

    def operation(self) -> tuple[Turn, int]:
        """Draw one sum, difference, product or exact division."""
        sign = self.pick(("+", "+", "-", "-", "x", "x", "/"))
        if sign == "x":
            left, right = self.rng.randint(0, 12), self.rng.randint(0, 12)
            value = left * right
        elif sign == "/":
            right, value = self.rng.randint(1, 12), self.rng.randint(0, 12)
            left = right * value
        else:
            left, right = self.number(), self.number()
            if sign == "-" and left < right and self.chance(0.9):
                left, right = right, left
            value = left + right if sign == "+" else left - right
        return self.sum_turn(left, sign, right, value), value

    def follow(self, last: int) -> tuple[Turn, int]:
        """Go on from the last result."""
        number = self.rng.randint(1, self.pick((9, 9, 20, 50)))
        kinds = ["plus"] * 3 + ["double"] * (last <= 60)
        kinds += ["minus"] * 2 if last >= number else []
        kinds += ["half"] if last % 2 == 0 and last <= 200 else []
        kinds += ["times"] if 0 <= last <= 12 else []
        kind = self.pick(kinds)
        small = number if number <= 12 else 3
        table = {
            "plus": ("[And|and|Now|And now|] plus {n}[?|]|[Add|Now add|Then add|and add] {n}"
                     "[.| to it.| to that.|]", f"{last} + {number}", last + number),
            "minus": ("[And|and|Now|And now|] minus {n}[?|]|[Subtract|Now subtract|Take away|"
                      "Now take away] {n}[.|]", f"{last} - {number}", last - number),
            "double": ("[Now double it|Double it|And twice that|Double that|and doubled][.|?|]",
                       f"2 x {last}", 2 * last),
            "half": ("[And half of that|Half of it|Now halve it|And the half of it|Halve that]"
                     "[.|?|]", f"{last} / 2", last // 2),
            "times": ("[And|and|Now|] times {n}[?|]|[Multiply|Now multiply] [it|that] by {n}[.|]",
                      f"{last} x {small}", last * small),
        }
        form, term, value = table[kind]
        if kind in ("plus", "minus", "times"):
            first, second = re.split(r"(?<=\])\|(?=\[)", form)
            form = first if self.chance(0.5) else second
        used = small if kind == "times" else number
        return (self.x(form, n=used).strip(), self.result(term, value)), value

    def double_half(self) -> tuple[Turn, int]:
        """Ask for a double or a half."""
        number = self.rng.randint(1, 60)
        if self.chance(0.5):
            user = self.x("[What is the double of {n}|What is twice {n}|Double {n}|What's {n} "
                          "doubled][?|]", n=number)
            return (user, self.result(f"2 x {number}", 2 * number)), 2 * number
        number *= 2
        user = self.x("[What is half of {n}|What's half of {n}|Halve {n}|whats half of {n}|What is "
                      "the half of {n}][?|]", n=number)
        return (user, self.result(f"{number} / 2", number // 2)), number // 2

    def compare(self) -> tuple[Turn, int]:
        """Ask which number is larger or smaller."""
        left, right = self.number(), self.number()
        right += left == right
        large = self.chance(0.6)
        value = max(left, right) if large else min(left, right)
        other = left + right - value
        word = self.x("[larger|bigger|greater|more]" if large else "[smaller|less]")
        said = "larger" if large else "smaller"
        user = self.x("[Which is|Which number is|What is|whats] {w}[, |: ]{l} or {r}?",
                      w=word, l=left, r=right)
        return (user, f"{value} is {said} than {other}."), value

    def sequence(self) -> tuple[Turn, int]:
        """Count on, count down or continue a row."""
        start, step = self.rng.randint(0, 60), self.pick((1, 1, 1, 2, 2, 3, 5, 10))
        count = self.rng.randint(4, 6)
        row = [start + step * i for i in range(count + 4)]
        if self.chance(0.3):
            row.reverse()
        if self.chance(0.5):
            shown, hidden = row[:4], row[4]
            user = self.x("[What comes next|What is the next number|Which number comes next|"
                          "Continue]: {r}[?|, ...?]", r=", ".join(map(str, shown)))
            return (user, self.x("[The next number is {v}.|{v} comes next.]", v=hidden)), hidden
        low, high = start, start + self.rng.randint(4, 10)
        run = list(range(low, high + 1))
        if self.chance(0.3):
            low, high, run = high, low, run[::-1]
        user = self.x("[Count|Please count|Can you count] from {l} [down |]to {h}[.|?|]"
                      if low > high else "[Count|Please count|Can you count] from {l} to {h}[.|?|]",
                      l=low, h=high)
        return (user, ", ".join(map(str, run)) + "."), high

    def word_problem(self) -> tuple[Turn, int]:
        """Make a word problem of one step."""
        name, item = self.pick(GIRLS + BOYS), self.pick(
            ("apple", "pear", "book", "ball", "card", "coin", "cookie", "egg", "pencil", "shell",
             "stamp", "star", "cake", "flower", "key", "marble"))
        items, high = plural(item), self.pick((10, 20, 20, 50))
        left, right = self.rng.randint(3, high), self.rng.randint(2, high)
        kind = self.pick(("+", "+", "-", "-", "x", "/"))
        he = "she" if name in GIRLS else "he"
        slots = {"n": name, "i": items, "he": he}
        if kind == "+":
            text, term = self.x("{n} has {l} {i} and [gets|buys|finds] {r} more. How many {i} does "
                                "{he} have[ now|]?", l=left, r=right, **slots), f"{left} + {right}"
            value = left + right
        elif kind == "-":
            left, right = max(left, right) + 2, min(left, right)
            text = self.x("{n} has {l} {i} and [gives away|loses|sells] {r}. How many {i} [are "
                          "left|does {he} have left]?", l=left, r=right, **slots)
            term, value = f"{left} - {right}", left - right
        elif kind == "x":
            left, right = self.rng.randint(2, 10), self.rng.randint(2, 10)
            text = self.x("{n} has {l} [boxes|bags] with {r} {i} [in each|each]. How many {i} [are "
                          "there|does {he} have]?", l=left, r=right, **slots)
            term, value = f"{left} x {right}", left * right
        else:
            right, value = self.rng.randint(2, 6), self.rng.randint(2, 10)
            text = self.x("{n} shares {l} {i} equally among {r} friends. How many {i} does "
                          "each friend get?", l=right * value, r=right, **slots)
            term = f"{right * value} / {right}"
            return (text, f"{term} = {value}, so each friend gets {value} {items}."), value
        noun = item if value == 1 else items
        return (text, self.x("{t} = {v}[|, so the answer is {v} {o}].", t=term, v=value, o=noun)), \
            value

    def arithmetic(self, most: int = 8) -> Turns:
        """Make a chain of sums."""
        turns: Turns = []
        last: int | None = None
        for _ in range(self.rng.randint(1, most)):
            if last is not None and self.chance(0.4) and 0 <= last <= 99:
                turn, last = self.follow(last)
            else:
                make: Callable[[], tuple[Turn, int]] = self.pick(
                    (self.operation,) * 9 + (self.double_half, self.compare, self.sequence)
                    + (self.word_problem,) * 2)
                turn, value = make()
                free = make in (self.compare, self.sequence)
                last = None if free else value
            turns.append(turn)
        return turns

    def sums(self, most: int = 8) -> Turns:
        """Ask for nothing but sums."""
        return [self.operation()[0] for _ in range(self.rng.randint(2, most))]

    # ------------------------------------------------------------ countries

    def capital_turn(self, country: str, again: bool = False) -> Turn:
        """Ask for a capital."""
        form = (
            "[And of {c}?|and of {c}?|And {c}?|What about {c}?|And what about {c}?|and the capital "
            "of {c}?]" if again else
            "[What is|What's|whats|Tell me|Do you know|Please tell me|Name] the capital of {c}?")
        user = self.x(form, c=the(country))
        answer = f"The capital of {the(country)} is {self.w.capitals[country]}"
        return user, answer + ("" if answer.endswith(".") else ".")

    def of_capital(self) -> Turn:
        """Ask which country a capital belongs to."""
        country = self.pick([c for c, k in self.w.capitals.items() if c not in k])
        city = self.w.capitals[country].removesuffix(", D.C.")
        user = self.x("[Which country has the capital {k}?|{k} is the capital of which country?|"
                      "What country is {k} the capital of?|Of which country is {k} the capital?]",
                      k=city)
        return user, f"{city} is the capital of {the(country)}."

    def where_city(self) -> Turn:
        """Ask where a city is."""
        country = self.pick([c for c, k in self.w.capitals.items() if c not in k])
        city = self.w.capitals[country].removesuffix(", D.C.")
        user = self.x("[Where is {k}?|In which country is {k}?|where is {k}]", k=city)
        return user, f"{city} is in {the(country)}."

    def currency_turns(self) -> Turns:
        """Ask for currencies, with a follow-up."""
        first, second = self.rng.sample(sorted(CURRENCY), 2)
        say = "The currency of {c} is the {m}."
        turns = [(self.x("[What is|What's|Tell me] the currency of {c}?", c=the(first))
                  if self.chance(0.6) else
                  self.x("[What money do they use|Which currency is used|How do you pay] in {c}?",
                         c=the(first)), say.format(c=the(first), m=CURRENCY[first]))]
        if self.chance(0.5):
            turns.append((self.x("[And in {c}?|What about {c}?|and {c}?]", c=the(second)),
                          say.format(c=the(second), m=CURRENCY[second])))
        return turns

    def continent_turns(self) -> Turns:
        """Ask for continents, with a follow-up."""
        known = sorted(self.w.continents)
        turns = []
        for i in range(self.rng.randint(1, 2)):
            country = self.pick(known)
            form = "[And {c}?|What about {c}?|and {c}?]" if i else \
                "[Which continent is {c} in|On which continent is {c}|What continent is {c} on]?"
            turns.append((self.x(form, c=the(country)),
                          cap(f"{the(country)} is in {self.w.continents[country]}.")))
        return turns

    def language_turns(self) -> Turns:
        """Ask for languages, with a follow-up."""
        first, second = self.rng.sample(sorted(LANGUAGE), 2)
        say = "The main language of {c} is {l}."
        turns = [(self.x("[What language do they speak|Which language is spoken|What do people "
                         "speak|What is the language] in {c}?", c=the(first)),
                  say.format(c=the(first), l=LANGUAGE[first]))]
        if self.chance(0.5):
            turns.append((self.x("[And in {c}?|What about {c}?|and {c}?]", c=the(second)),
                          say.format(c=the(second), l=LANGUAGE[second])))
        return turns

    def capitals(self) -> Turns:
        """Ask for one to four capitals in a row."""
        countries = self.rng.sample(sorted(self.w.capitals), self.rng.randint(1, 4))
        return [self.capital_turn(c, again=i > 0) for i, c in enumerate(countries)]

    def countries(self, most: int = 5) -> Turns:
        """Talk about countries."""
        turns: Turns = []
        while not turns or (len(turns) < most and self.chance(0.6)):
            kind = self.pick("cccctwmnl")
            turns += {"c": self.capitals, "m": self.currency_turns, "n": self.continent_turns,
                      "l": self.language_turns, "t": lambda: [self.of_capital()],
                      "w": lambda: [self.where_city()]}[kind]()
        return turns[:most]

    # ------------------------------------------------------------ everyday facts

    def some(self, group: str, count: int) -> list[str]:
        """Draw different words of a group."""
        return self.rng.sample(self.w.groups[group], count)

    def name_some(self) -> Turn:
        """Ask for a few members of a group."""
        group = self.pick([g for g in self.w.groups if g != "seasons"])
        count = self.rng.randint(2, 5)
        words = ("two", "three", "four", "five")
        asked = words[count - 2] if self.chance(0.7) else str(count)
        items = self.some(group, count)
        user = self.x("[Name|Tell me|Give me|Can you name|List|Please name|I need] {n} {g}[.|]",
                      n=asked, g=group)
        if user.startswith("Can"):
            user = user.removesuffix(".") + "?"
        said = self.x("[{I}.|{W} {g} are {i}.|Here are {w} {g}: {i}.]", I=cap(joined(items)),
                      W=cap(words[count - 2]), w=words[count - 2], g=group, i=joined(items))
        return user, said

    def opposite(self) -> Turn:
        """Ask for an opposite."""
        left, right = self.pick(self.opposites)
        return (self.x("[What is|What's|whats|Tell me] the opposite of [{l}|\"{l}\"]?", l=left),
                self.x("The opposite of {l} is {r}.", l=left, r=right))

    def plural_turn(self) -> Turn:
        """Ask for a plural."""
        one, many = self.pick(self.plurals)
        return (self.x("[What is the plural of {l}?|plural of {l}?|How do you say more than one "
                       "{l}?|What's the plural of {l}?]", l=one),
                f"The plural of {one} is {many}.")

    def rhyme(self) -> Turn:
        """Ask for a rhyme."""
        left, right = self.pick(self.rhymes)
        if self.chance(0.5):
            left, right = right, left
        return (self.x("[What rhymes with {l}?|Give me a rhyme for {l}.|Which word rhymes with "
                       "{l}?|Find a rhyme for {l}.]", l=left), f"{cap(right)} rhymes with {left}.")

    def animal_fact(self) -> Turn:
        """Ask for a sound, the legs or the young of an animal."""
        kind = self.pick("slb")
        if kind == "s":
            animal, sound = self.pick(list(SOUNDS.items()))
            return (self.x("[What does {a} say?|What sound does {a} make?|whats the sound of {a}?|"
                           "How does {a} sound?]", a=a(animal)),
                    self.x("{A} says \"{s}\".", A=cap(a(animal)), s=sound))
        if kind == "l":
            animal, legs = self.pick(list(LEGS.items()))
            return (f"How many legs does {a(animal)} have?",
                    f"{cap(a(animal))} has {legs or 'no'} legs.")
        animal, baby = self.pick(list(BABIES.items()))
        return (self.x("[What is a baby {a} called?|What do you call a baby {a}?|whats a baby {a} "
                       "called]", a=animal), f"A baby {animal} is called {a(baby)}.")

    def colour_of(self) -> Turn:
        """Ask for the colour of a thing."""
        thing, colour = self.pick(list(THING_COLOUR.items()))
        return (self.x("[What colour is|What color is|Which colour has|Tell me the colour of] {t}?",
                       t=thing), f"{cap(thing)} is {colour}.")

    def calendar(self) -> Turn:
        """Ask for the next or the previous day or month."""
        row = self.pick((DAYS, MONTHS))
        i, after = self.rng.randrange(len(row)), self.chance(0.6)
        other = row[(i + (1 if after else -1)) % len(row)]
        word = "after" if after else "before"
        kind = "day" if row is DAYS else "month"
        return (self.x("[Which {k} comes|What {k} comes|What comes|What {k} is] {w} {d}?", k=kind,
                       w=word, d=row[i]), f"{other} comes {word} {row[i]}.")

    def month_number(self) -> Turn:
        """Ask for the place of a month in the year."""
        names = ("first", "second", "third", "fourth", "fifth", "sixth", "seventh", "eighth",
                 "ninth", "tenth", "eleventh", "twelfth")
        i = self.rng.randrange(12)
        return (self.x("[What is|Which is|What's] the {n} month[ of the year|]?", n=names[i]),
                f"{MONTHS[i]} is the {names[i]} month.")

    def letters(self) -> Turn:
        """Ask about the letters of a word."""
        word, kind = self.pick(SPELL.split()), self.pick("sssfln")
        if kind == "s":
            return (self.x("[How do you spell|Spell|Can you spell|Please spell|spell the word] "
                           "[{w}|\"{w}\"]", w=word) + self.pick(("?", ".", "")),
                    "-".join(word.upper()) + ".")
        if kind == "n":
            return (self.x("How many letters [are in|does] {w}[?|]", w=word).replace(
                f"does {word}", f"does {word} have"),
                f"{cap(word)} has {len(word)} letters.")
        which, letter = ("first", word[0]) if kind == "f" else ("last", word[-1])
        return (f"What is the {which} letter of {word}?",
                f"The {which} letter of {word} is {letter.upper()}.")

    def order(self) -> Turn:
        """Ask to sort words or numbers, or for the next letter."""
        kind = self.pick("nnwl")
        if kind == "l":
            i, after = self.rng.randrange(1, 25), self.chance(0.6)
            abc = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"
            word, other = ("after", abc[i + 1]) if after else ("before", abc[i - 1])
            return (self.x("[Which letter comes|What letter comes|What comes] {w} {l}[ in the "
                           "alphabet|]?", w=word, l=abc[i]), f"{other} comes {word} {abc[i]}.")
        if kind == "w":
            items = self.some("fruits" if self.chance(0.5) else "animals", 3)
            return (self.x("[Sort|Put|Please sort] these words [by the alphabet|from A to Z]: {i}.",
                           i=", ".join(items)).replace("Put these words by",
                                                       "Sort these words by"),
                    cap(", ".join(sorted(items))) + ".")
        items = self.rng.sample(range(1, 100), self.rng.randint(3, 5))
        down = self.chance(0.25)
        user = self.x("[Sort|Please sort|Order|Can you sort] [these numbers|the numbers|]: {i}",
                      i=", ".join(map(str, items))).replace(" :", ":")
        return (user + (" from large to small." if down else ""),
                ", ".join(map(str, sorted(items, reverse=down))) + ".")

    def element(self) -> Turn:
        """Ask for the symbol of an element."""
        name, symbol = self.pick(list(ELEMENTS.items()))
        return (self.x("What is the [chemical |]symbol [of|for] {n}?", n=name),
                f"The symbol for {name} is {symbol}.")

    def fact(self, most: int = 5) -> Turns:
        """Ask simple everyday questions."""
        makers = (self.name_some, self.name_some, self.opposite, self.plural_turn, self.rhyme,
                  self.animal_fact, self.animal_fact, self.colour_of, self.calendar,
                  self.month_number, self.letters, self.letters, self.order, self.order,
                  self.element, lambda: self.qa(FACTS), lambda: self.qa(FACTS))
        count = self.rng.randint(1, most)
        chosen = self.rng.sample(makers, count)
        return [make() for make in chosen]

    # ------------------------------------------------------------ stories

    def story_parts(self, animal: str) -> dict[str, str]:
        """Draw the hero, the helper, the thing and the place of a story."""
        girl = self.chance(0.5)
        hero = self.pick(GIRLS if girl else BOYS)
        helper = self.pick([n for n in GIRLS + BOYS if n != hero])
        friend = self.pick([n for n in HEROES if n != animal])
        return {"h": hero, "H": hero, "k": helper, "K": helper, "animal": animal,
                "friend": friend, "o": self.pick(TREASURES), "place": self.pick(PLACES),
                "trait": self.pick(TRAITS), "like": self.pick(LIKES),
                "he": "she" if girl else "he", "He": "She" if girl else "He",
                "him": "her" if girl else "him", "his": "her" if girl else "his",
                "fruits": plural(self.pick(("apple", "pear", "plum", "cherry", "berry")))}

    def story_text(self, p: dict[str, str]) -> tuple[str, str]:
        """Write the story and its short form."""
        problem, attempt, rescue, _ = self.pick(PLOTS)
        end = self.pick(ENDINGS)
        hero = f"{a(p['trait'])} {p['animal']} named {p['h']}"
        opening = self.x("[Once upon a time, there was {hero}, who lived {place}.|There once was "
                         "{hero}, who lived {place}.|{Hero} lived {place}.]",
                         hero=hero, Hero=cap(hero), place=p["place"])
        parts = [opening, self.x("{H} liked {like}.", **p) if self.chance(0.8) else "",
                 self.x("{He} had a {o} and [loved it very much|took it everywhere|was proud of "
                        "it].", **p).replace("a old", "an old"),
                 self.x("One [day|morning|evening], " + problem + ".", **p),
                 self.x(attempt + ".", **p),
                 self.x("Then {k} the {friend} came by[| and wanted to help].", **p),
                 self.x(rescue + ".", **p), self.x(end, **p)]
        if self.chance(0.35):
            parts.append(self.x("[The end.|They lived happily ever after.|And the {o} was never "
                                "forgotten.]", **p))
        short = [opening, self.x("One day, " + problem + ".", **p),
                 self.x("Then {k} the {friend} helped.", **p), self.x(end, **p)]
        return " ".join(s for s in parts if s), " ".join(short)

    def story_question(self, p: dict[str, str]) -> Turn:
        """Ask about the story just told."""
        return self.pick((
            (self.x("[What was the name of the {animal}?|What was the {animal} called?|what's the "
                    "name of the {animal}?|Who was the {animal}?]", **p),
             self.x("The {animal} was named {h}.", **p)),
            (self.x("[Who helped {h}?|Who was the helper?|Who came to help?]", **p),
             self.x("{K} the {friend} helped {h}.", **p)),
            (self.x("[Where did {h} live?|Where did the {animal} live?]", **p),
             self.x("{H} lived {place}.", **p)),
            (self.x("[What did {h} have?|What thing did {h} own?]", **p),
             self.x("{H} had a {o}.", **p).replace("a old", "an old")),
            (self.x("[What animal was {h}?|What kind of animal was {h}?]", **p),
             self.x("{H} was {an}.", an=a(p["animal"]), **p)),
        ))

    def story(self, most: int = 4) -> Turns:
        """Tell a story, with questions or another one after it."""
        animal = self.pick(HEROES)
        if self.chance(0.75):
            user = self.x("[Tell me a story|Tell me a short story|Can you tell me a story|Write a "
                          "story|Please tell me a story|I want a story|A story, please,|Tell a "
                          "bedtime story|Make up a story] about {an}", an=a(animal))
            user += "?" if user.startswith("Can") else self.pick((".", ".", "!"))
        else:
            user = self.x("[Tell me a story.|Can you tell me a story?|I would like a story.|Tell "
                          "me a short story, please.|Story time!|Do you know a story?]")
        parts = self.story_parts(animal)
        full, short = self.story_text(parts)
        turns, is_short = [(user, full)], False
        for _ in range(self.rng.randint(0, most - 1)):
            kind = self.pick("qqqsa")
            if kind == "q":
                turn = self.story_question(parts)
                turns += [] if turn[1] in [answer for _, answer in turns] else [turn]
            elif kind == "s" and not is_short:
                is_short = True
                turns.append((self.x("[Make it shorter|A shorter one|Shorter|Tell it in a few "
                                     "sentences|Sum it up][.|, please.|]"), short))
            elif kind == "a" and len(turns) < 3:
                parts = self.story_parts(self.pick(HEROES))
                form, is_short = "[Another one|One more|Another story|Tell me one more]", False
                if self.chance(0.5):
                    asked = self.x(form + "[.|, please.|!]")
                else:
                    asked = self.x("[Now one about|And a story about|Another one about] {an}[.|, "
                                   "please.]", an=a(parts["animal"]))
                full, short = self.story_text(parts)
                turns.append((asked, full))
        if most > 2 and self.chance(0.25):
            turns.append((self.x("[That was nice|I liked it|What a lovely story|Great story][!|.]"),
                          self.x("[Thank you|I am glad that you liked it]!"
                                 "[| Would you like another one?| 🙂]")))
        return turns

    # ------------------------------------------------------------ bookings

    def booking_slots(self, kind: str) -> dict[str, str]:
        """Draw the wishes of a guest."""
        slots = {"city": self.pick(self.w.cities), "day": self.day(), "people": str(
            self.rng.randint(1, 8)), "price": self.pick(("cheap", "mid-price", "fine"))}
        if kind == "restaurant":
            slots |= {"time": self.hour(17, 22), "food": self.pick(
                ("Italian", "Indian", "Chinese", "Greek", "Mexican", "Thai", "French", "Japanese"))}
        elif kind == "hotel":
            slots |= {"nights": str(self.rng.randint(1, 9))}
        elif kind == "flight":
            slots |= {"start": self.pick([c for c in self.w.cities if c != slots["city"]]),
                      "time": self.pick(("in the morning", "at noon", "in the evening"))}
            del slots["price"]
        else:
            slots |= {"time": self.hour(14, 22), "film": self.pick(
                ("The Lost Key", "Blue Moon", "The Brave Fox", "Night Train", "Summer Rain",
                 "The Old Map", "Star Garden", "The Quiet River"))}
            del slots["price"]
        return slots

    def day(self) -> str:
        """Draw a day for a booking."""
        return self.pick(("today", "tomorrow")) if self.chance(0.2) else "on " + (
            self.pick(DAYS) if self.chance(0.6) else
            f"{self.rng.randint(1, 28)} {self.pick(MONTHS)}")

    def hour(self, low: int, high: int) -> str:
        """Draw a time of day."""
        hour = self.rng.randint(low, high) - 12
        return f"at {hour}{self.pick(('', '', ':30'))} pm"

    def count_word(self, number: str, one: str) -> str:
        """Say a number with its noun."""
        return f"{number} {one if number == '1' else 'people' if one == 'person' else one + 's'}"

    def booking_phrase(self, kind: str, slots: dict[str, str]) -> str:
        """Say what is booked, as far as it is known."""
        s = slots
        people = f" for {self.count_word(s['people'], 'person')}" if "people" in s else ""
        place = f" in {s['city']}" if "city" in s else ""
        day = " " + s["day"] if "day" in s else ""
        time = " " + s["time"] if "time" in s else ""
        price = s.get("price", "") + " "
        if kind == "restaurant":
            name = a((price + s.get("food", "") + " ").lstrip().replace("  ", " ") + "restaurant")
            name = re.sub(r"^a (?=I)", "an ", name)
            return f"a table{people} at {name}{place}{day}{time}"
        if kind == "hotel":
            nights = f" for {self.count_word(s['nights'], 'night')}" if "nights" in s else ""
            return f"{a((price + 'hotel room').lstrip())}{people}{place}{nights}" + (
                f", starting {day.strip()}" if day else "")
        if kind == "flight":
            start = f" from {s['start']}" if "start" in s else ""
            goal = f" to {s['city']}" if "city" in s else ""
            return f"a flight{start}{goal}{people}{day}{time}"
        tickets = self.count_word(s["people"], "film ticket") if "people" in s else "film tickets"
        film = f" for {s['film']}" if "film" in s else ""
        return f"{tickets}{film}{place}{day}{time}"

    def ask_slot(self, kind: str, key: str) -> str:
        """Ask for one missing wish."""
        forms = {
            "city": "[Which city would you like to fly to|Where would you like to fly]?"
            if kind == "flight" else "[In which city|Which city is it for|Which city]?",
            "day": "[For which day|Which day|What day would you like]?",
            "people": "[How many people|For how many people]?" if kind != "film" else
            "How many tickets would you like?",
            "price": "[What price range would you like|Cheap, mid-price or fine]?",
            "time": "[At what time|What time would you like|What time]?",
            "food": "[What kind of food would you like|Which food do you like]?",
            "nights": "[How many nights|For how many nights]?",
            "start": "[Where do you start|From which city]?",
            "film": "[Which film would you like to see|Which film]?",
        }
        return self.x("[Sure. |Gladly. |Okay. |Thank you. ||]" + forms[key])

    def tell_slot(self, key: str, value: str) -> str:
        """Answer with one wish."""
        bare = value.removeprefix("on ").removeprefix("at ") if self.chance(0.4) else value
        forms = {
            "city": "[{v}|In {v}|{v}, please]", "day": "[{b}|{b}, please|{v}]",
            "people": "[{v}|For {v}|{v}, please|We are {v}|{v} of us]" if value != "1" else
            "[1|Just me|Only me|1, please]", "price": "[{v}|{v}, please|Something {v}]",
            "time": "[{b}|{v}|{v}, please]", "food": "[{v}|{v}, please|{v} food]",
            "nights": "[{v}|{n}|For {n}]", "start": "[From {v}|{v}]", "film": "[{v}|{v}, please]",
        }
        text = self.x(forms[key], v=value, b=bare, n=self.count_word(value, "night")
                      if key == "nights" else "")
        return cap(text) + self.pick((".", "", "."))

    def booking_open(self, kind: str, slots: dict[str, str], known: list[str]) -> str:
        """Start a booking with the wishes given so far."""
        phrase = self.booking_phrase(kind, {k: slots[k] for k in known})
        text = self.x("[I would like to book|I want to book|Can you book|Book|Please book|I need|"
                      "I'd like|Could you find me] ") + phrase
        return text + ("?" if text.startswith(("Can", "Could")) else ".")

    def change(self, kind: str, slots: dict[str, str]) -> str:
        """Change one wish and say so."""
        key = self.pick([k for k in ("time", "people", "day", "city") if k in slots])
        old, new = slots[key], slots[key]
        while new == old or (key == "city" and new == slots.get("start")):
            new = self.booking_slots(kind)[key]
        slots[key] = new
        if key == "people":
            said = self.count_word(new, "ticket" if kind == "film" else "person")
        else:
            said = new.removeprefix("at ").removeprefix("on ")
        return self.x("[Make it {s} instead|No, make it {s}|Sorry, make it {s}|Please change it to "
                      "{s}|Actually, {s}, please|Can we change it to {s}][.|]", s=said)

    def confirm(self, kind: str, slots: dict[str, str]) -> str:
        """Repeat all wishes and ask whether they are right."""
        return self.x("[So you would like|So that is|You want|That makes] ") + self.booking_phrase(
            kind, slots) + self.x(". [Is that right|Is this correct|Shall I book it|Is that "
                                  "okay]?")

    def finish(self) -> str:
        """End a booking with the honest note that it is only play."""
        note = "I cannot really book, because this is a demo."
        code = self.pick("ABCDEFGHKLMNPRST") + self.pick("ABCDEFGHKLMNPRST") + str(
            self.rng.randint(100, 999))
        made_up = f"Your made-up booking number is {code}."
        return self.x("[Done|All set|Great|Wonderful]! ") + self.pick((
            f"{made_up} {note}", f"{made_up} This is a demo, so nothing is really booked.",
            f"{note} But that is how it would go.", f"{made_up} {note}"))

    def booking(self, most: int = 6) -> Turns:
        """Fill the slots of a booking, one after the other."""
        kind = self.pick(("restaurant", "restaurant", "hotel", "flight", "film"))
        slots = self.booking_slots(kind)
        keys = list(slots)
        if kind == "restaurant" and self.chance(0.5):
            slots.pop(keys.pop(keys.index(self.pick(("price", "food")))))
        if kind == "film" and self.chance(0.5):
            slots.pop("city")
            keys.remove("city")
        asked = self.rng.randint(0, min(len(keys), most - 2))
        missing = self.rng.sample(keys, asked)
        user = self.booking_open(kind, slots, [k for k in keys if k not in missing])
        turns: Turns = []
        for key in missing:
            turns.append((user, self.ask_slot(kind, key)))
            user = self.tell_slot(key, slots[key])
        turns.append((user, self.confirm(kind, slots)))
        if self.chance(0.4):
            user = self.change(kind, slots)
            turns.append((user, self.x("[Okay|No problem|Sure|Of course]. ")
                          + self.confirm(kind, slots)))
        turns.append((self.x("[Yes|Yes, please|Yes, that's right|Correct|That is right|Perfect|"
                             "Yes, book it|Sounds good][.|!|]"), self.finish()))
        if self.chance(0.3):
            turns.append(self.qa(CLOSING))
        return turns

    # ------------------------------------------------------------ lists

    def bullets(self, items: Sequence[str], numbered: bool) -> str:
        """Write a Markdown list."""
        return "\n".join(f"{i}. {item}" if numbered else f"- {item}"
                         for i, item in enumerate(items, 1))

    def list_items(self) -> tuple[str, str, list[str], bool]:
        """Draw a wish for a list: the request, the opening, the items, and if in order."""
        kind = self.pick("gggspt")
        if kind == "g":
            group, count = self.pick([g for g in self.w.groups if g != "seasons"]), \
                self.rng.randint(3, 5)
            return (self.x("[Make a list of|Give me a list of|List|Write a list of|Please list] "
                           "{n} {g}", n=count, g=group), f"Here are {count} {group}:",
                    [cap(i) for i in self.some(group, count)], False)
        if kind == "s":
            task = self.pick(list(STEPS))
            said = task.replace("my", "your")
            return (self.x("[How do I|How can I|Give me steps to|Tell me how to] {t}", t=task),
                    f"Here is how to {said}:", list(STEPS[task]), True)
        if kind == "p":
            goal = self.pick(list(PACKING))
            items = self.rng.sample(PACKING[goal], self.rng.randint(3, 4))
            return (self.x("[What do I need for|Make a list for|Give me a list for|What should I "
                           "bring for] {g}", g=goal), f"For {goal} you need:",
                    [cap(i) for i in items], False)
        goal = self.pick(list(TIPS))
        items = self.rng.sample(TIPS[goal], self.rng.randint(3, 4))
        return (self.x("[Give me some tips to|How can I|Give me tips to|List some ways to] {g}",
                       g=goal), f"Here are some tips to {goal}:", items, False)

    def lists(self, most: int = 3) -> Turns:
        """Ask for a short list, and perhaps for the same list in another form."""
        user, opening, items, ordered = self.list_items()
        numbered = ordered or self.chance(0.2)
        if numbered and not ordered:
            user = user.replace("a list", "a numbered list")
            numbered = "numbered" in user
        user += "?" if user.startswith(("How", "What")) else "."
        turns = [(user, f"{opening}\n{self.bullets(items, numbered)}")]
        kind = self.pick("nnclx") if most > 1 else "x"
        if kind == "n" and not numbered:
            turns.append((self.x("[Number them|Make it numbered|Now with numbers|As a numbered "
                                 "list][.|, please.]"), self.bullets(items, True)))
        elif kind == "c":
            words = ("three", "four", "five")
            turns.append((self.x("[How many are there|How many is that|How many items are in the "
                                 "list]?"), f"There are {words[len(items) - 3]}."))
        elif kind == "l":
            which, item = self.pick((("first", items[0]), ("last", items[-1]),
                                     ("second", items[1])))
            turns.append((self.x("[What is the {w} one|What was the {w} one|Which one is {w}]?",
                                 w=which), f"The {which} one is: {item.rstrip('.')}."))
        return turns

    # ------------------------------------------------------------ memory

    def memory(self) -> dict[str, tuple[Turn, Turn, Turn]]:
        """Make facts about the user: telling, asking, and asking too early."""
        name, city = self.pick(self.w.names), self.pick(self.w.cities)
        colour, pet, pet_name = self.pick(COLOURS), self.pick(PETS), self.pick(PET_NAMES)
        dish, hobby, job = self.pick(DISHES), self.pick(HOBBIES), self.pick(JOBS)
        age = self.rng.randint(6, 90)
        told = {
            "name": ("[My name is {v}|I am {v}|I'm {v}|Hi, I am {v}|Hello, my name is {v}|Call me "
                     "{v}][.|!]", "[Nice to meet you|Hello|Hi], {v}![| How can I help you?]",
                     "[What is my name|What's my name|Do you know my name|Who am I|Do you remember "
                     "my name]?", "Your name is {v}.", "your name", name),
            "colour": ("My favourite colour is {v}.", "{V} is a [lovely|nice|beautiful] colour.",
                       "[What is|What's|Do you remember] my favourite colour?",
                       "Your favourite colour is {v}.", "your favourite colour", colour),
            "city": ("I [live in|am from|come from] {v}.",
                     "{v} [sounds like a nice place|is a nice place|must be interesting].",
                     "[Where do I live|Which city do I live in|Where am I from]?",
                     "You told me {v}.", "where you live", city),
            "food": ("[My favourite food is|I like to eat] {v}.",
                     "[Yum, {v}|Good choice]! [I cannot eat, but it sounds good|That "
                     "sounds tasty].",
                     "[What is my favourite food|What's my favourite food|What do I like to eat]?",
                     "You like {v}.", "what you like to eat", dish),
            "hobby": ("My hobby is {v}.", "[That sounds like fun|What a nice hobby]!",
                      "[What is my hobby|What's my hobby|Which hobby do I have]?",
                      "Your hobby is {v}.", "your hobby", hobby),
            "job": ("I [work as|am] {v}.", "[That is an important job|That sounds interesting].",
                    "[What is my job|What's my job|What do I work as]?",
                    "You are {v}.", "your job", a(job)),
            "age": ("I am {v} years old.", "[Thank you for telling me|Good to know].",
                    "[How old am I|What is my age]?", "You are {v} years old.", "your age", age),
            "pet": ("I have {p} [named|called] {v}.", "[How nice|Lovely]! Say hello to {v} for me.",
                    "[What is the name of my {q}|What's my {q}'s name|What is my {q} called]?",
                    "Your {q} is named {v}.", "your pet", pet_name),
        }
        extra = {"p": a(pet), "q": pet}
        made = {}
        for key, (tell, reply, ask, answer, unknown, value) in told.items():
            slots = {"v": value, "V": cap(str(value)), **extra}
            question = self.x(ask, **slots)
            made[key] = ((self.x(tell, **slots), self.x(reply, **slots)),
                         (question, self.x(answer, **slots)),
                         (question, self.x("I do not know {u} yet. [Would you like to tell me?|You "
                                           "have not told me so far.]", u=unknown)))
        return made

    def thread(self, most: int = 8) -> Turns:
        """Tell facts, talk of other things, and ask for the facts again."""
        facts = self.memory()
        keys = self.rng.sample(list(facts), self.rng.randint(1, 3))
        if "name" not in keys and self.chance(0.6):
            keys.insert(0, "name")
        turns: Turns = []
        if self.chance(0.12):
            turns.append(facts[keys[0]][2])
        for key in keys:
            turns.append(facts[key][0])
            if self.chance(0.3):
                turns += self.segment(1)[1]
        while len(turns) + len(keys) < self.rng.randint(3, most):
            turns += self.segment(1)[1]
        if self.chance(0.2):
            other = self.pick([k for k in facts if k not in keys])
            turns.append(facts[other][2])
        asked = self.rng.sample(keys, self.rng.randint(1, len(keys)))
        turns += [facts[key][1] for key in asked]
        if self.chance(0.2):
            turns.append(self.qa(CLOSING))
        return turns

    # ------------------------------------------------------------ whole dialogues

    def topics(self) -> tuple[tuple[str, Callable[..., Turns], float], ...]:
        """List the topics with their weights."""
        return (("greetings", self.greetings, 9), ("identity", self.identity, 9),
                ("arithmetic", self.arithmetic, 50), ("countries", self.countries, 9),
                ("facts", self.fact, 10), ("stories", self.story, 7),
                ("bookings", self.booking, 8), ("refusals", self.refusals, 6),
                ("unknown", self.unknown, 6), ("lists", self.lists, 4))

    def segment(self, most: int) -> tuple[str, Turns]:
        """Make a short piece of one topic, for use inside a longer dialogue."""
        rows = [row for row in self.topics() if most > 1 or row[0] not in ("bookings", "stories")]
        name, make, _ = self.rng.choices(rows, [row[2] for row in rows])[0]
        return name, make(3 if name == "bookings" else most)

    def mixed(self) -> Turns:
        """Join pieces of several topics, sometimes with a fact that is asked for at the end."""
        turns: Turns = [self.qa(HELLO)] if self.chance(0.3) else []
        told = self.memory()[self.pick(("name", "name", "colour", "pet", "city"))]
        remember = self.chance(0.25)
        if remember:
            turns.append(told[0])
        stories = 0
        for _ in range(self.rng.randint(3, 6)):
            name, piece = self.segment(2)
            if name in ("stories", "bookings") and stories:
                continue
            stories += name in ("stories", "bookings")
            turns += piece
        if remember:
            turns.append(told[1])
        if self.chance(0.25):
            turns.append(self.qa(CLOSING))
        return turns

    def dialogue(self) -> tuple[str, Turns]:
        """Draw one dialogue and the name of its topic."""
        if self.chance(0.3):
            return "mixed", self.mixed()
        rows = (*self.topics(), ("thread", self.thread, 16))
        name, make, _ = self.rng.choices(rows, [row[2] for row in rows])[0]
        return name, make()

    # ------------------------------------------------------------ surface of the user's words

    def sloppy(self, text: str) -> str:
        """Write as people type in a hurry."""
        for long, short in self.rng.sample(SHORT_FORMS, 6):
            text = re.sub(rf"\b{long}\b", short, text, count=1, flags=re.IGNORECASE)
        return re.sub(r"[.!?,]+(?=\s|$)", "", text).lower() or text

    def styled(self, text: str, style: str) -> str:
        """Give a user turn the style of its writer."""
        if text.endswith("?") and text.startswith(ORDERS):
            text = text[:-1] + "."
        if self.chance(0.4):
            text = text.replace("I am ", "I'm ").replace("do not ", "don't ")
        if style == "lower":
            text = text.lower()
        elif style == "bare":
            text = text.rstrip(".!?")
        elif style == "sloppy" and not re.search(r"[:=]", text):
            text = self.sloppy(text)
        elif style == "polite" and self.chance(0.4) and text.startswith(POLITE):
            text = self.pick(("Please, ", "Excuse me, ", "Sorry, ")) + text[0].lower() + text[1:]
        return text.strip() or "hi"


def messages(maker: Maker, turns: Turns) -> list[dict[str, str]]:
    """Turn pairs into chat messages, with one writing style per dialogue."""
    styles = ("plain",) * 9 + ("lower",) * 3 + ("bare",) * 3 + ("sloppy",) * 3 + ("polite",) * 2
    style = maker.pick(styles)
    out: list[dict[str, str]] = []
    if maker.chance(0.06):
        out.append({"role": "system", "content": maker.pick(SYSTEMS)})
    for user, assistant in turns:
        out.append({"role": "user", "content": maker.styled(user, style)})
        out.append({"role": "assistant", "content": assistant.strip()})
    return out


def generate_drills(templates: Path, count: int, seed: int) -> Iterator[dict]:
    """Yield `count` dialogues of what is hardest to learn: sums, memory and bookings."""
    maker = Maker(read_words(templates), random.Random(seed))
    for _ in range(count):
        kind = maker.pick("aaaaaattbb")
        turns = {"a": maker.sums, "t": maker.thread, "b": maker.booking}[kind]()
        yield {"source": f"drills/{kind}", "messages": messages(maker, turns)}


def generate(templates: Path, count: int, seed: int) -> Iterator[dict]:
    """Yield exactly `count` dialogues; the same seed gives the same dialogues."""
    maker = Maker(read_words(templates), random.Random(seed))
    for _ in range(count):
        topic, turns = maker.dialogue()
        yield {"source": f"dialogues/{topic}", "messages": messages(maker, turns)}
