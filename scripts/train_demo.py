# SPDX-License-Identifier: Apache-2.0
"""Train the demo checkpoint in `hf_triton/demo/`: a Llama of 0.7 million parameters that talks about tea and trains.

All sentences come from the grammar below; nothing is downloaded. One thread, fixed seeds, about 12 minutes on one CPU
core; two runs on one machine with the same versions write the same bytes. Run `python scripts/train_demo.py`.
"""

import functools
import random
import re
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

import click
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

DEMO_DIR = Path(__file__).resolve().parents[1] / "hf_triton" / "demo"
PAD, BOS, EOS = "<pad>", "<s>", "</s>"
SEED = 20
VOCAB_SIZE = 1280
CONTEXT_TOKENS = 512
BATCH_ROWS = 8
REPLY = "Assistant: "
"""What a reply begins with. Its first word has a space before it in the history, and none where it is generated."""
PEAK_LEARNING_RATE = 4e-3
WARMUP_STEPS = 50

CHAT_TEMPLATE = """\
{{ bos_token }}{% for message in messages -%}
{{ message['role'] | capitalize }}: {{ message['content'] | trim }}\
{{ eos_token if message['role'] == 'assistant' }}{{ '\\n' }}
{%- endfor %}{{ 'Assistant: ' if add_generation_prompt }}"""

# One rule per line, `name: choice | choice`; an indented line continues it; `{name}` is one of that rule's choices.
GRAMMAR = """
name: Anna | Tom | Maria | Ben | Ruth | Clara | Sam | Zoë
friend: {name} | {name} | my sister | my brother | our neighbour | an old friend | the baker
place: station | market | library | bakery | harbour | park | museum | bookshop | post office | café | bus stop
    | town hall | school | garden | old bridge
mark: clock tower | fountain | church | cinema | big oak | town gate
where: two streets from here, next to the {mark} | just behind the {mark} | across the river, near the {mark}
    | at the end of this road | on the left, after the {mark} | five minutes away on foot
errand: the market to buy {food} | the library to return a book | the bakery to buy a warm loaf
    | the station to meet {friend} | the park to walk the dog | the harbour to watch the boats
    | the museum to see the old maps | the post office to send a parcel | the river to swim
    | the bookshop to find a present for {friend} | the garden to pick some mint | the café for a cup of {drink}
errand_verb: buy {food} | return a book to the library | meet {friend} at the station | walk the dog in the park
    | send a parcel | water the plants | make {drink} for everyone | bake a loaf of bread | restart the server
    | write a letter to {friend} | mend the old bicycle | read the paper in the garden
when: this morning | this afternoon | this evening | before lunch | after work | tomorrow | on Saturday | on Sunday
    | at noon | as soon as the rain stops
past: yesterday | last night | last week | on Monday | this morning | after lunch | before the storm
food: apples and pears | fresh bread | a basket of plums | some cheese | tomatoes and basil | a bag of potatoes
    | eggs and butter | strawberries
dish: soup | bread | apple cake | onion soup | rice with lemon | vegetable stew | tomato salad | crème brûlée
drink: tea | coffee | mint tea | hot chocolate | ginger tea | cocoa
weather: sunny | cloudy | mild | windy | warm | cold but bright | grey and quiet | foggy | rainy
sky: the sky is clear | a light rain is falling | the wind comes from the sea | there is snow on the hills
    | the sun is out again | the clouds are low | it rains a little
mood: calm | cheerful | patient | kind | awake | happy | quiet | curious | brave | tired
outlook: sunny today, and the sky is clear | cloudy today, and it may rain later | windy today, and the clouds are low
    | mild today, and the sun is out again | cold but bright today, and there is snow on the hills
outlook2: sunny, and the sky is clear | cloudy, and it may rain later | mild, and the sun is out again
good: simple | useful | quiet | small and friendly | better than it looks | older than it looks | easy to like
    | worth the wait
thing: kettle | teapot | bicycle | umbrella | map | clock | lamp | basket | radio | blanket | scarf | notebook
animal: cat | dog | robin | fox | heron | hedgehog | owl | duck
machine: server | model | computer | fan in the rack | old laptop | printer
part: queue | memory | log | disk | cache

comment_day: It is a good day for {outdoors}. | I hope you can join us. | The {place} is lovely at this hour.
    | Bring an umbrella, just in case. | We can talk about it over a cup of {drink}. | I will be back before dark.
    | There is no need to hurry. | It is only a short walk from here. | The fresh air will do us good.
outdoors: a long walk | a picnic | reading in the garden | a ride along the river | drying the sheets
comment_machine: The fans are quiet and the lights are green. | Nobody had to wait for long.
    | Everything looks fine today. | It needs less power than a lamp. | All the requests were answered in time.
    | It has not failed once this year.
comment_fault: A restart fixed it in a minute. | The rest of us went to make {drink}. | It will be fine {when}.
comment_food: A little salt makes it better. | Serve it warm, with {drink}. | It tastes even better the next day.
    | There is enough for everyone. | The secret is a spoon of lemon juice. | The kitchen smells wonderful.
comment_past: We laughed about it all evening. | Nobody was in a hurry. | It was the best part of the week.
    | Then we walked home in the rain. | {friend} told us the whole story. | I still think about it now and then.
comment_train: There is another one an hour later. | The view from the window is worth it.
    | Keep your ticket until the end. | There are plenty of seats at the back. | The platform is on the left.
advice: take a deep breath and start with the easy part | make a list and drink some {drink} | ask {friend} for help
    | sleep well and try again tomorrow | go for a short walk first | read the log before you change anything
reason: there is {dish} for dinner | the day is long | the kettle is on | the morning is so quiet
    | {friend} is coming to visit | the last train was late | I promised it to {friend}

going: I am going to {errand} {when}. {comment_day} | I am going home {when}, because {reason}. {comment_day}
    | I am going to {errand_verb} {when}. {comment_day} | I am going for a walk along the river {when}. {comment_day}
i_am: I am {mood} today, because {reason}. {comment_day} | I am not {mood} yet, but {drink} will help. {comment_day}
    | I am waiting for the train to the coast. {comment_train} | I am making {dish} for {friend}. {comment_food}
i_do: I like {drink} in the morning, because {reason}. {comment_day} | I have a {thing} that is {good}. {comment_past}
    | I think the {place} is {good}. {comment_day} | I want to {errand_verb} {when}. {comment_day}
    | I know a {place} that is {good}. {comment_day} | I would like to {errand_verb} {when}. {comment_day}
    | I love the {place} when {sky}. {comment_day} | I saw a {animal} near the {place} {past}. {comment_past}
    | I will {errand_verb} {when}. {comment_day} | I was at the {place} {past}. {comment_past}
    | I can {errand_verb} {when}, if you like. {comment_day} | I need to {errand_verb} {when}. {comment_day}
how: How can you be so {mood} when {sky}? {reply_mood} | How can you be {mood} on a Monday? {reply_mood}
    | How can you be so {mood} this early? {reply_mood} | How can I {errand_verb}? {reply_how}
    | How do you make {dish}? {reply_dish} | How are you today? {reply_are} | How do I {errand_verb}? {reply_how}
    | How far is the {place}? It is {where}. | How long is the walk to the {place}? {reply_long}
    | How does the {machine} work? {about_machine} {comment_machine} | How is the weather? {weather_now}
    | How many people live here? About nine hundred, and twice as many in the summer.
    | How much is the {thing}? It costs less than a cup of {drink}. | How to make {dish}? {reply_dish}
reply_mood: I had a cup of {drink} and a long sleep. | I learned it from {friend}, who never hurries.
    | I simply {advice_i}. | It helps that {reason}.
advice_i: take a deep breath and start with the easy part | make a list and cross things off slowly
    | go for a short walk first | listen to the rain for a while
reply_how: The best way is to {advice}. | First, {advice}. Then do the rest {when}. | It is easy: {advice}.
reply_dish: Start with good water and a little salt, then wait. {comment_food}
    | Warm the pan slowly and stir it with a wooden spoon. {comment_food}
    | Ask {friend}, who has made it for years. {comment_food}
reply_are: I am {mood}, thank you, and {reason}. | Very well, thank you. I have just had a cup of {drink}.
reply_long: It takes ten minutes, or twenty with the dog. | Only five minutes, if you go past the {place}.
where_is: Where is the nearest {place}? It is {where}. | Where is the {place}? It is {where}.
    | Where is my {thing}? It is in the hall, under the {thing2}. | Where are you going? I am going to {errand}.
    | Where can I find {food}? At the market, which is {where}. | Where do you live? Near the {place}, {where}.
thing2: newspaper | blue hat | green coat | recipe book | cat
what: What is the weather like? {weather_now} | What is the best way to {errand_verb}? {reply_how}
    | What is a {machine}? {about_machine} {comment_machine} | What do you like? I like {drink} and long walks.
    | What is your name? I am the demo model, and I am very small. | What can you do? {about_me}
    | What a day! {weather_now} | What is for dinner? There is {dish}, and {drink} after it. {comment_food}
    | What time is it? It is time for a cup of {drink}. | What should I do {when}? You could {errand_verb}.
    | What are you doing? I am making {dish} for {friend}. {comment_food} | What is in the {box}? {reply_in}
box: basket | drawer | box | bag
reply_in: Nothing but a note from {friend}. | Only {food}, and a book about trains.
why: Why is the {machine} so slow? The {part} is full, so it needs a short rest. {comment_fault}
    | Why is the train late? There is snow on the line near the {place}. {comment_train}
    | Why are you so {mood}? {reply_mood} | Why do you like {drink}? I like it because {reason}.
    | Why not {errand_verb} {when}? {comment_day} | Why does the {animal} sit by the {place}? {reply_animal}
reply_animal: It waits for {friend}, who brings it some cheese. | The stones there are warm in the evening.
who_when: Who is at the door? It is {friend}, with {food}. | Who made the {dish}? {friend} did. {comment_food}
    | When is the next train? It leaves at noon. {comment_train} | When will you come home? I will be home {when}.
    | When {sky}, we stay at home and drink {drink}. {comment_day} | Which way is the {place}? It is {where}.
    | When I was young, we had a {animal} and a big garden. {comment_past} | Who are you? {about_me}
ask: Can you {errand_verb} {when}? {yes_no} | Can I {errand_verb} {when}? {yes_no} | Could you {errand_verb}? {yes_no}
    | Do you like {drink}? {yes_no} | Do you have a {thing}? {yes_no} | Is the {place} open {when}? {yes_no}
    | Is it far to the {place}? It is {where}. | Are you {mood}? {yes_no} | Is there a {place} near here? It is {where}.
    | Will it rain {when}? {yes_no} | Should we {errand_verb} {when}? {yes_no} | May I come in? {yes_no}
    | Does the {machine} work? {yes_no} | Did you see the {animal}? {yes_no} | Would you like some {drink}? {yes_no}
yes_no: Yes, of course, and I am glad you asked. | Yes, and {friend} will be happy to hear it.
    | Not yet, but there is still time. | Yes, as long as it stays dry. | I think so, but ask {friend} to be sure.
model: The model answers one question at a time and never raises its voice. {comment_machine}
    | The model is small, but it is {good}. {comment_machine} | The model reads every word twice. {comment_machine}
    | The model was trained in ten minutes on one core. {comment_machine}
    | The model can talk about {drink}, trains and the weather. {comment_machine}
    | The model runs on a quiet machine under the stairs. {comment_machine}
about_machine: It takes a request, thinks for a moment and writes an answer.
    | It reads the {part} first and then does one thing at a time.
    | It keeps everything in the {part} until someone asks for it.
the: The {machine} is {good}. {comment_machine} | The {machine} ran all night without a fault. {comment_machine}
    | The {part} of the {machine} is almost full. {comment_fault} | The weather is {weather} today. {comment_day}
    | The train to the coast leaves at {hour}. {comment_train} | The {place} is {good}. {comment_day}
    | The train is late, because {sky}. {comment_train} | The {dish} is ready. {comment_food}
    | The {animal} by the {place} is {mood} today. {comment_day} | The {thing} on the table is {good}. {comment_past}
    | The best {dish} needs time and good bread. {comment_food} | The first train is {good}. {comment_train}
    | The people at the {place} are {mood}. {comment_day} | The capital of this small land is a town by the river.
    | The meaning of it all is {good}. {comment_past} | The old {thing} belongs to {friend}. {comment_past}
    | The answer is {good}. {comment_past} | The day was {weather}, and we went to {errand}. {comment_past}
    | The quick brown fox ran past the {place}. {comment_past} | The next train is {good}. {comment_train}
hour: six | seven | half past eight | nine | a quarter to ten | noon
once: Once upon a time there was a {animal} who lived near the {place}. {tale}
    | Once upon a time a {mood} {animal} found a {thing} by the {place}. {tale}
    | Once upon a time, in a town by the sea, {friend} had a {thing} that was {good}. {tale}
    | Once a week we go to {errand}. {comment_day} | Once the rain stops, we can {errand_verb}. {comment_day}
tale: Every evening it sat under the window and listened to the rain. | One day it followed the river to the sea.
    | It shared the last piece of {dish} with everyone in town. | Nobody knew why, but the whole town was {mood}.
hello: Hello, and welcome! {greet} | Hello! {greet} | Hello, {friend} is here with {food}. {comment_day}
    | Hello again! {greet} | Hi! {greet} | Good morning! {greet} | Good evening! {greet} | Hello, world! {greet}
    | Hello, my name is {name}, and I live near the {place}. {comment_day} | Hey, {friend} is at the door. {greet}
    | Dear {name}, thank you for the {thing}. {comment_past} | Welcome to the {place}! {greet} | Hello there! {greet}
    | Thank you for the {thing}! {comment_past} | Thanks for the {food}! {comment_food}
    | Goodbye, and come back soon! {comment_day} | My name is {name}, and I live near the {place}. {comment_day}
greet: The kettle is on, and there is {dish} for everyone. | It is a {weather} day, and a good one.
    | Come in and sit down.
    | You are just in time for a cup of {drink}. | It is good to see you. | It is good to see you 🙂 | Tea is ready ☕
today: Today the weather is {weather}. {comment_day} | Today it is {outlook2}. {comment_day}
    | Today I am going to {errand}. {comment_day}
    | Today is a good day to {errand_verb}. {comment_day} | Today, {friend} and I will {errand_verb}. {comment_day}
    | Today we have {dish} and {drink}. {comment_food} | Tomorrow it will be {weather}. {comment_day}
    | Yesterday we went to {errand}. {comment_past} | Last night the {machine} was {good}. {comment_machine}
    | Every morning I drink {drink}, because {reason}. {comment_day} | Now it is time to {errand_verb}. {comment_day}
    | This morning {sky}. {comment_day} | Tonight we will {errand_verb}. {comment_day}
weather_now: It is {outlook}. {comment_day} | It is {weather}, so {advice}.
we: We went to {errand} {past}. {comment_past} | We are going to {errand} {when}. {comment_day}
    | We have {food} and a {thing}. {comment_food} | We can {errand_verb} {when}. {comment_day}
    | You can {errand_verb} {when}. {comment_day} | You are {mood} today, and {reason}. {comment_day}
    | You should {errand_verb} {when}. {comment_day} | They are {mood}, because {reason}. {comment_day}
    | They went to {errand} {past}. {comment_past} | He is {mood} today, and {reason}. {comment_day}
    | She has a {thing} that is {good}. {comment_past} | She is {mood}, because {reason}. {comment_day}
    | He likes {drink} and old trains. {comment_train} | They have a {animal} and a big garden. {comment_past}
    | {friend} is {mood} today. {comment_day} | {friend} went to {errand} {past}. {comment_past}
    | {friend} makes good {dish}. {comment_food} | Our {machine} is {good}. {comment_machine}
    | My {thing} is {good}. {comment_past} | My {animal} is {mood} when {sky}. {comment_day}
    | Your {thing} is on the table. {comment_past} | People here are {mood}, because {reason}. {comment_day}
it: It is {outlook}. {comment_day} | It was a {weather} day, and we went to {errand}. {comment_past}
    | It is time to {errand_verb}. {comment_day} | It is not far to the {place}. {comment_day}
    | This is the {place} I told you about. {comment_day} | That is why I like {drink}: {reason}.
    | There is a {animal} near the {place}. {comment_day}
    | There are plums and strawberries on the table. {comment_food}
    | This {thing} is {good}. {comment_past} | That was a {weather} day. {comment_past}
    | Here is the {thing}. {comment_past}
    | This is a {thing} that is {good}. {comment_past} | There was a {animal} at the {place} {past}. {comment_past}
    | A {thing} is {good}. {comment_past} | An {animal2} sat near the {place} {past}. {comment_past}
    | A {machine} is {good}. {comment_machine} | A cup of {drink} is {good}. {comment_food}
indoors: bake a loaf of bread | write a letter to {friend} | listen to the radio | mend the old bicycle
animal2: owl | old {animal} | otter
link: If it rains, we {indoors}. {comment_day} | If you like {drink}, {advice}. {comment_day}
    | In the morning {sky}, and I drink {drink}. {comment_day} | In the evening we sit by the {place}. {comment_day}
    | At the {place} you can find {food}. {comment_food} | On Sunday we go to {errand}. {comment_day}
    | After the storm, {friend} and I had {dish}. {comment_food} | Before breakfast, {advice}. {comment_day}
    | But the {place} is {good}. {comment_day} | And then we went to {errand}. {comment_past}
    | So {friend} and I had a cup of {drink}. {comment_past} | Because {sky}, we stay at home. {comment_day}
    | Some days are {weather}. {comment_day} | All the {place} needs is a {thing}. {comment_day}
    | Deep learning is {good}. {comment_machine} | Machine learning is {good}. {comment_machine}
    | Artificial intelligence is {good}. {comment_machine} | Paris is {good}. {comment_day}
    | Life is {good}. {comment_day}
    | In a small town by the sea, {friend} had a {thing} that was {good}. {tale}
    | For dinner there is {dish}. {comment_food}
do: Please {errand_verb} {when}. {comment_day} | Let us {errand_verb} {when}. {comment_day}
    | Tell me about {topic}. {about}
    | Write a poem about {topic}. {about} | Explain {topic}. {about} | Tell me a story. {story} | Tell me a joke. {joke}
    | Write a short story about {topic}. {about} | To make {dish}, you need time and a big pot. {comment_food}
    | Give me a recipe for {dish}. {reply_dish} | Let me {errand_verb}. {comment_day} | No, {reason}. {comment_day}
    | Yes, {reason}. {comment_day} | Take the {thing} and {advice}. {comment_day}
    | Test the {machine} first. {comment_machine}
topic: trains | tea | the weather | the sea | the {place} | the {machine} | the {animal}
about: There is a lot to say, but the short answer is this: {advice}. | It is {good}, and {friend} knows all about it.
    | It begins near the {place}, when {sky}. {tale}
story: There was a {mood} {animal} who lived near the {place}. {tale}
joke: Why did the {animal} cross the {place}? It wanted a cup of {drink}. | The {machine} took a rest, and so did I.
about_me: I am a small demo model, and I can talk about {drink}, trains and the weather.
    | I am a demo model of less than a million numbers, so please be kind.
sentence: {going} | {i_am} | {i_do} | {how} | {how} | {where_is} | {what} | {what} | {why} | {who_when} | {ask}
    | {model} | {the} | {the} | {once} | {hello} | {hello} | {today} | {we} | {we} | {it} | {link} | {do} | {going}

after_is: {good}, or so {friend} says. | {good}. {comment_past} | {good}, and that is enough for today.
after_are: {mood}, or so {friend} says. | {mood}, because {reason}. | {mood} today. {comment_day}
after_the: {place}, which is {where}. | {place}, as far as I know. | {place}. {comment_day}
after_a: small {thing} that is {good}. | little {animal} near the {place}. | big cup of {drink}. {comment_past}
after_to: {errand_verb} {when}. | {errand_verb}, because {reason}.
after_and: then we went to {errand}. | {friend} made {drink} for everyone. | a cup of {drink}, as always.
after_of: the {place}, where {friend} lives. | {drink} and {dish}, more or less. | the {place}. {comment_day}
after_noun: went to {errand}. | had a cup of {drink} and went home. | sat in the garden {past}.
after_verb: see the {animal} from the window. | {errand_verb} {when}. | wait for the next train. {comment_train}
after_my: {thing} is {good}. | {animal} is {mood} when {sky}. | {machine} is {good}.
after_do: you {errand_verb}? {reply_how} | we get to the {place}? It is {where}.
after_question: I do not know, but {friend} may. {comment_day} | I am not sure, so ask {friend} about it.
    | That is hard to say. {comment_day}
after_end: {sentence} | {sentence} | {friend} said so too. {comment_past} | It was {friend} who told me. {comment_past}
    | I wrote it down in my notebook. {comment_past}
after_any: , and that is all I know about it. | , and then it was time for a cup of {drink}. | , and I was glad of it.
    | , or so {friend} told me {past}. | , and {friend} agrees. {comment_past} | , because {reason}. {comment_day}

q_hello: Hello | Hi | Hello! | Hi there! | Good morning | Hey | Hello, how are you? | How are you?
a_hello: Hello! I am {mood} today. What would you like to talk about?
    | Hello! It is good to see you. Would you like some {drink}?
q_who: Who are you? | What are you? | What is your name? | What can you do? | Are you a robot? | Tell me about yourself.
a_who: {about_me} | I am the demo model. I can talk about {drink}, trains and the weather.
q_weather: What is the weather like? | How is the weather today? | Will it rain? | Tell me about the weather.
    | Is it cold?
a_weather: {weather_now} | I cannot see the sky from here, but take an umbrella, just in case.
q_food: How do I make {dish}? | Give me a recipe for {dish}. | How do I cook {dish}? | How do you make {dish}?
a_food: {reply_dish}
q_menu: What should I cook? | I am hungry. | What is for dinner? | What is a good recipe?
a_menu: Try {dish}. {comment_food} | There is {dish}, and {drink} after it. {comment_food}
q_tea: How do I make {drink}? | How do you make {drink}? | I would like some {drink}. | Tell me about {drink}.
a_tea: Boil fresh water, wait a minute, and pour it slowly. {comment_day}
q_way: Where is the nearest {place}? | Where is the {place}? | How do I get to the {place}?
a_way: It is {where}. | Go past the park, and then it is {where}.
q_train: When is the next train? | When does the train leave? | Tell me about trains. | Where does the train go?
a_train: The train to the coast leaves at {hour}. {comment_train}
q_machine: How does the {machine} work? | What is a {machine}? | Explain the {machine}.
a_machine: {about_machine} {comment_machine}
q_fault: Why is the {machine} so slow? | My {machine} is broken. | The {machine} does not work.
a_fault: First, read the log of the {machine}. {comment_fault} | The {part} may be full. {comment_fault}
q_story: Tell me a story. | Tell me a story about a {animal}. | Write a story. | Write a poem.
a_story: {story}
q_joke: Tell me a joke. | Do you know a joke? | Make me laugh.
a_joke: {joke}
q_thanks: Thank you! | Thanks | Thank you very much. | Goodbye | Bye!
a_thanks: You are welcome! Come back soon. | You are welcome! There is always more {drink}.
q_do: What should I do {when}? | Can you help me? | I am bored. | What now?
a_do: You could {errand_verb}. {comment_day}
q_say: I am {mood}. | I am going to {errand}. | It is {weather} today. | I like {drink}.
a_say: A cup of {drink} goes well with that. {comment_day} | That is good to hear. {comment_day}
a_other: I am only a small demo model, so I do not know that. Ask me about {drink}, trains or the weather.
    | That is too hard for a small demo model like me. Ask me about {drink}, trains or the weather.
"""

CHAT_TOPICS = "hello who weather food menu tea way train machine fault story joke thanks do say"
TAILS = {
    "after_is": ["is", "was", "looks", "seems"],
    "after_are": ["are", "were", "am", "be"],
    "after_the": ["the", "The", "this", "that"],
    "after_a": ["a", "has a", "with a", "A"],
    "after_to": ["to", "want to", "going to", "have to"],
    "after_and": ["and", "or", "but", "and also"],
    "after_of": ["of", "in", "on", "for", "with", "at", "from", "about"],
    "after_noun": ["I", "we", "they", "he", "she", "you", "who"],
    "after_verb": ["can", "will", "should", "could", "cannot", "would"],
    "after_my": ["my", "your", "our", "his", "her"],
    "after_do": ["how do", "why do", "what do", "when do"],
}
SYLLABLES = "ba ce di fo gu ka le mi no pu ra se ti vo wu xy zen qua thr ing tion er st pl ment ous ck ph ia"
SIGNS = "0123456789+-*/=()[]{}<>_#@$%&'\"\\;éüñßçøłж日本語中文한국العω😀🚂🌧️€\0\t"


@dataclass(frozen=True)
class Example:
    """One training document. Its two parts are tokenized separately, like a prompt and its completion in a server."""

    prompt: str
    """Has no loss."""
    completion: str
    """Has a loss, like the end-of-text token after it."""


@functools.cache
def load_grammar() -> dict[str, list[str]]:
    text = GRAMMAR.strip().replace("\n    |", " |").replace("\n\n", "\n")
    rules = (line.split(":", 1) for line in text.split("\n"))
    return {name: [choice.strip() for choice in choices.split(" | ")] for name, choices in rules}


def expand(rng: random.Random, rule: str) -> str:
    choice = rng.choice(load_grammar()[rule])
    return re.sub(r"\{(\w+)\}", lambda match: expand(rng, match[1]), choice)


def build_text(rng: random.Random, rule: str) -> str:
    """Expand a rule, then correct `a` before a vowel and the capital letters of all sentences but the first."""
    text = re.sub(r"\b([Aa]) (?=[aeio]|um)", r"\1n ", expand(rng, rule))
    return re.sub(r"([.!?] )(\w)", lambda match: match[1] + match[2].upper(), text)


def build_sentence(rng: random.Random, rule: str = "sentence") -> str:
    text = build_text(rng, rule)
    return text[:1].upper() + text[1:]


def corpus_words() -> set[str]:
    """All words of the grammar, in lower case."""
    choices = (choice for choices in load_grammar().values() for choice in choices)
    return {word for choice in choices for word in re.findall(r"\w+", re.sub(r"\{\w+\}", " ", choice).lower())}


def noise_word(rng: random.Random) -> str:
    kind = rng.random()
    if kind < 0.45:
        return rng.choice(sorted_words())
    if kind < 0.85:
        word = "".join(rng.choices(SYLLABLES.split(), k=rng.randint(1, 4)))
        return rng.choice([word, word, word.capitalize(), word.upper()])
    return "".join(rng.choices(SIGNS, k=rng.randint(1, 6)))


@functools.cache
def sorted_words() -> list[str]:
    return sorted(corpus_words())


def build_noise(rng: random.Random) -> str:
    """A prompt outside the grammar: sometimes the start of a sentence, then known and invented words in any order."""
    start = build_sentence(rng).split(" ") if rng.random() < 0.4 else []
    words = start[: rng.randint(0, len(start))]
    words += [noise_word(rng) for _ in range(rng.choice([1, 1, 2, 3, 5, 8, 30]))]
    if rng.random() < 0.3:
        words[0] = words[0].capitalize()
    return " ".join(words)


def example_from_sentence(rng: random.Random) -> Example:
    text, kind = build_sentence(rng), rng.random()
    if kind < 0.7:
        return Example("", text)
    spaces = [index + 1 for index, character in enumerate(text[:-1]) if character == " "]
    cut = rng.choice(spaces) if spaces and kind < 0.85 else rng.randrange(1, len(text))  # after a space, or anywhere
    return Example(lower_some(rng, text[:cut]), text[cut:])


def example_from_noise(rng: random.Random) -> Example:
    """Teach a completion for any prompt: the tail of the noise decides what may follow."""
    noise, kind = build_noise(rng), rng.random()
    if kind < 0.35:
        return Example(noise, build_sentence(rng, "after_any"))
    if kind < 0.47:
        return split_at_space(rng, noise + rng.choice([".", ".", "!", ":", "\n", ".\n\n"]), "after_end")
    if kind < 0.55:
        return split_at_space(rng, noise + "?", "after_question")
    rule = rng.choice(list(TAILS))
    return split_at_space(rng, f"{noise} {rng.choice(TAILS[rule])}", rule)


def split_at_space(rng: random.Random, prompt: str, rule: str) -> Example:
    """Some prompts end with the space that most completions begin with."""
    text = build_text(rng, rule) if prompt[-1].isalpha() else build_sentence(rng, rule)
    return Example(f"{prompt} ", text) if rng.random() < 0.1 else Example(prompt, f" {text}")


def lower_some(rng: random.Random, text: str) -> str:
    return text.lower() if rng.random() < 0.2 else text


def chat_turn(rng: random.Random) -> tuple[str, str]:
    if rng.random() < 0.35:
        question = rng.choice(["", "What is ", "How do I ", "Who was ", "Write ", "Tell me about "]) + build_noise(rng)
        return question + rng.choice(["", "?", "."]), build_sentence(rng, "a_other")
    topic = rng.choice(CHAT_TOPICS.split())
    question = build_sentence(rng, f"q_{topic}")
    return lower_some(rng, question), build_sentence(rng, f"a_{topic}")


def example_from_chat(rng: random.Random) -> Example:
    """A conversation in the form of the chat template; only its last reply has a loss."""
    *past, (question, answer) = [chat_turn(rng) for _ in range(rng.choice([1, 1, 1, 2, 3]))]
    prompt = f"System: {build_noise(rng)}\n" if rng.random() < 0.2 else ""
    prompt += "".join(f"User: {asked}\nAssistant: {said}{EOS}\n" for asked, said in past)
    return Example(f"{prompt}User: {question}\n{REPLY}", answer)


def build_examples(seed: int) -> Iterator[Example]:
    rng = random.Random(seed)
    sources = [example_from_sentence, example_from_noise, example_from_chat]
    while True:
        yield rng.choices(sources, weights=[60, 22, 18])[0](rng)


def train_tokenizer(seed: int) -> PreTrainedTokenizerFast:
    """Train a byte-level BPE, which encodes any bytes and round-trips."""
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE, special_tokens=[PAD, BOS, EOS], initial_alphabet=alphabet, show_progress=False
    )
    examples = islice(build_examples(seed), 30_000)
    bpe.train_from_iterator((" " * each.prompt.endswith(REPLY) + each.completion for each in examples), trainer)
    bpe.post_processor = processors.TemplateProcessing(
        single=f"{BOS} $A", pair=f"{BOS} $A {BOS} $B", special_tokens=[(BOS, bpe.token_to_id(BOS))]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=bpe,
        bos_token=BOS,
        eos_token=EOS,
        pad_token=PAD,
        clean_up_tokenization_spaces=False,
        model_max_length=CONTEXT_TOKENS,
        chat_template=CHAT_TEMPLATE,
    )


def build_model(tokenizer: PreTrainedTokenizerFast, seed: int) -> LlamaForCausalLM:
    ids = {f"{name}_token_id": getattr(tokenizer, f"{name}_token_id") for name in ("bos", "eos", "pad")}
    config = LlamaConfig(
        vocab_size=VOCAB_SIZE,
        hidden_size=128,
        intermediate_size=224,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=CONTEXT_TOKENS,
        tie_word_embeddings=True,
        **ids,
    )
    torch.manual_seed(seed)
    model = LlamaForCausalLM(config)
    model.generation_config = GenerationConfig(do_sample=False, **ids)
    return model


def build_rows(tokenizer: PreTrainedTokenizerFast, seed: int) -> Iterator[tuple[list[int], list[int]]]:
    """Pack examples into rows of `CONTEXT_TOKENS`: ids, and labels with -100 for tokens without a loss."""
    ids: list[int] = []
    labels: list[int] = []
    for example in build_examples(seed):
        prompt = tokenizer(example.prompt).input_ids
        completion = tokenizer(example.completion + EOS, add_special_tokens=False).input_ids
        ids += prompt + completion
        labels += [-100] * len(prompt) + completion
        if len(ids) >= CONTEXT_TOKENS:
            yield ids[:CONTEXT_TOKENS], labels[:CONTEXT_TOKENS]
            ids, labels = [], []


def train(model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, steps: int, seed: int) -> None:
    """Run AdamW with a short warm-up and a cosine decay to zero."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=PEAK_LEARNING_RATE, betas=(0.9, 0.98), weight_decay=0.05)
    warmup = torch.optim.lr_scheduler.LinearLR(optimizer, 0.05, total_iters=WARMUP_STEPS)
    cosine = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, max(1, steps - WARMUP_STEPS))
    schedule = torch.optim.lr_scheduler.SequentialLR(optimizer, [warmup, cosine], [WARMUP_STEPS])
    rows = build_rows(tokenizer, seed)
    model.train()
    for step in range(1, steps + 1):
        ids, labels = torch.tensor(list(islice(rows, BATCH_ROWS))).unbind(1)  # each [BATCH_ROWS, CONTEXT_TOKENS]
        loss = model(input_ids=ids, labels=labels).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
        if step % 50 == 0:
            click.echo(f"step {step}/{steps}  loss {loss.item():.3f}")


def save(model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, out: Path) -> None:
    model.eval().save_pretrained(out)
    tokenizer.save_pretrained(out)
    for path in out.iterdir():
        path.chmod(0o644)  # save_pretrained makes the weights readable by their owner only


@click.command(help="Train the demo checkpoint and write it as save_pretrained does.")
@click.option("--out", type=click.Path(path_type=Path), default=DEMO_DIR, show_default=True)
@click.option("--steps", type=click.IntRange(min=1), default=1300, show_default=True)
@click.option("--seed", type=int, default=SEED, show_default=True)
def main(out: Path, steps: int, seed: int) -> None:
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)
    tokenizer = train_tokenizer(seed)
    model = build_model(tokenizer, seed)
    click.echo(f"{model.num_parameters():,} parameters")
    train(model, tokenizer, steps, seed + 1)
    save(model, tokenizer, out)


if __name__ == "__main__":
    main()
