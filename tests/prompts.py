"""Prompts for the contract tests: texts and token ids, short and long, plain and unusual."""

PASSAGE = (
    "The miller had a daughter, and the daughter had a goose. Every morning she led it down to the river, where the "
    "water was clear and the stones were smooth, and every evening she led it home again. One day the goose would not "
    "come. It stood in the shallow water with its neck stretched out, and looked at the far bank, and said nothing. "
    '"What is it?" asked the girl. "What do you see?" But the goose only looked. So she took off her shoes and her '
    "stockings, tied up her skirt, and waded across. On the other side there lay a small box of dark wood, no longer "
    "than her hand, and on the box there was a lock of silver. She shook it, and something moved inside. "
)
MARKET = "There were apples, pears, plums; ribbons, buttons, bells; a blind fiddler, two dogs and a bear. "

CANDIDATES: list[str | list[int]] = [
    "Once upon a time there was a little rabbit who",
    "The King had three sons, and the youngest",
    "A",
    "In the middle of the forest stood a small house, and in the house",
    PASSAGE,
    PASSAGE + MARKET * 9 + "And when she had seen it all, the girl",
    MARKET * 16 + "Then the bear",
    '"Good morning," said the fox. "Where are you going?" "To the',
    "“Wer bist du?” fragte die Prinzessin, und der Frosch",
    "Il était une fois une reine à l'œil très vif, naïve, garçon",
    "昔々あるところに、おじいさんと",
    "🦊 and 🐰 went to the 🏰, and",
    "Wait... what?! -- (no, really) -- [it's] 3,141.59 & 100%; a/b\\c @ #7 ~ ^ _x_ {y} <z> |",
    "ONE TWO THREE FOUR FIVE",
    "1 2 3 4 5 6 7 8 9 10 11 12 13",
    "The end of the line\nand the next line\n\nand one more",
    "tab\tand   three spaces  and a trailing space ",
    "<s> is not a word, nor is </s>, said the",
    "supercalifragilisticexpialidociousantidisestablishmentarianism",
    [1],
    [1, 2, 1],
    [1, 403, 88, 1200, 4095, 3, 259],
    [77, 78, 79, 80, 2000, 2001],  # does not begin with BOS
    [1, *range(300, 800)],
    [5] * 33,
    "One day, Reddy Fox",
    "Long, long ago, when all the animals could talk,",
    "The old woman opened the door and saw",
    "Then the youngest brother said: ",
    "Far out at sea the water is as blue as",
    "He ran and ran until he came to",
    "“I will,” said she; and",
    [1, 2146, 671, 261],
    "Peter was not afraid of the dark. He",
]
