"""Sentences, for what a quantised sentence encoder does to their similarities."""

from __future__ import annotations

from itertools import product

_WHO = ("An old fisherman", "The young doctor", "Our football team", "A class of children")
_WHAT = ("repaired a broken bicycle", "cooked a spicy soup", "watched a film", "studied the stars")
_WHERE = ("in the harbour", "on a night train", "in the mountains", "behind the hospital")

#: Every pair has none, one or two of three things in common: similarities of every size.
RELATED = tuple(f"{who} {what} {where}." for who, what, where in product(_WHO, _WHAT, _WHERE))

#: Of many subjects: similarities close to one another, whose order little noise changes.
UNRELATED = (
    "The lighthouse keeper writes down the weather four times a day.",
    "A storm warning was issued for the whole northern coast.",
    "Fishermen pulled their boats onto the beach before the wind rose.",
    "The harbour freezes over only in very cold winters.",
    "Our train stopped for an hour because a tree lay across the track.",
    "The night bus takes twice as long but costs half as much.",
    "Cyclists asked the council for a wider lane over the bridge.",
    "An electric lorry can now cross the Alps on one charge.",
    "Bread dough needs patience more than it needs flour.",
    "Fry the onions slowly until they are brown and sweet.",
    "The recipe calls for two lemons, a chicken and a handful of olives.",
    "Old vines give fewer grapes, but better wine.",
    "Boil the jars before you fill them with jam.",
    "The bakery on the corner opens at five in the morning.",
    "Interest rates were left unchanged for the third month.",
    "The company paid back its loan two years early.",
    "Investors sold shares after the bank published its losses.",
    "A higher minimum wage did not reduce employment in the study.",
    "The euro fell against the dollar on Tuesday.",
    "Small shops struggle to pay the rent in the city centre.",
    "The court found the driver guilty of speeding.",
    "Lawyers argued for six days about a single clause.",
    "Parliament voted to make the records public.",
    "The witness changed her statement during the trial.",
    "A new law forbids throwing away unsold clothes.",
    "Telescopes in the desert see further than those near cities.",
    "The comet will be brightest in the last week of October.",
    "Two black holes merged a billion years ago, and we felt it today.",
    "The rover drilled a hole five centimetres deep into the rock.",
    "Sunspots come and go in a cycle of eleven years.",
    "Gravity on the Moon is a sixth of that on Earth.",
    "Bees find their way home by the position of the sun.",
    "The owl hears a mouse under a foot of snow.",
    "Whales of the same family sing the same song.",
    "A wolf was seen in the valley for the first time in a century.",
    "Coral reefs turn white when the water gets too warm.",
    "The oak in our garden is older than the house.",
    "Mushrooms appear two days after heavy rain.",
    "Vaccination has made measles rare in this country.",
    "The nurse measured the patient's blood pressure twice.",
    "Sleep helps the brain to keep what it learned during the day.",
    "Running every morning lowered his pulse within a month.",
    "The surgeon operated for nine hours without a break.",
    "A broken arm heals faster in children than in adults.",
    "The program crashed because it divided by zero.",
    "Please back up your files before you install the update.",
    "The compiler rejects code that uses a variable before it is set.",
    "Our server answers ten thousand requests a second.",
    "She found the error by reading the log from the end.",
    "The password must have at least twelve characters.",
    "Two threads wrote to the same address at the same time.",
    "A sorted list can be searched in logarithmic time.",
    "The orchestra tuned its instruments to the oboe.",
    "He learned to play the cello when he was sixty.",
    "The choir sang without a conductor.",
    "Her second novel sold better than her first.",
    "The painter mixed blue and yellow for the meadow.",
    "An unknown sonnet was found between the pages of a ledger.",
    "The museum shows coins that were found in a field.",
    "Archaeologists dated the ship to the ninth century.",
    "The bridge was built by soldiers who never saw it finished.",
    "The home team lost by a goal in the last minute.",
    "She broke the national record by two tenths of a second.",
    "The chess champion lost three games in a row.",
    "It rained so hard that the match was abandoned.",
    "Children under six ride the tram for free.",
    "The school teaches in two languages from the first day.",
    "The exam has forty questions and takes two hours.",
)
