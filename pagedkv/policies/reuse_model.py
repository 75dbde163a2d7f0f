"""How soon pages of a class and an age are used again: learnt online, ranked by Gittins index.

A *class* is what was known of a page when it was last used: how often it was seen (six steps), how
much of the request was known already (quarters), how long the request was (four steps); class 0 is
the last page of a request that was never seen before. An *age* is the number of pages requested
since then, in steps that grow by √2. A *cell* is a class at an age.

For each cell the model counts reuses and *exposure*, the page-time that remembered pages spent in
it; pages that are forgotten are so censored, as in survival analysis. The rate of a cell is shrunk
towards a log-linear model: the rate of the age times a factor for each feature and age group,
fitted by iterative proportional scaling (Deming and Stephan 1940). Rates by class and age follow
LHD (Beckmann, Chen, Cidon 2018); ranks are Gittins indices (Gittins 1979): the best ratio, over all
times to give up, of the chance of a reuse to the expected time until reuse or giving up.
"""

from typing import Any

import numpy as np

from pagedkv.kernel_cache import kernel

NUM_AGES = 36
FIRST_AGE = 64.0
"""Pages requested until the first age ends."""
SEEN, KNOWN, LENGTH = 6, 4, 4
NUM_CLASSES = 1 + SEEN * KNOWN * LENGTH
NUM_CELLS = NUM_CLASSES * NUM_AGES
NUM_FACTORS = 4
_GROUP = 4
"""Ages that share their factors."""
NUM_GROUPS = NUM_AGES // _GROUP
_PRIOR_EVENTS = 1.0
"""How many reuses the log-linear model counts as, beside those of a cell."""
_PRIOR_RATE = 0.5
"""Before anything is known: the chance of a reuse while the age grows e-fold."""
_DECAY = 0.999
_OCTAVES = 40
_STEPS_AN_OCTAVE = 16
_NUM_STEPS = _OCTAVES * _STEPS_AN_OCTAVE
"""Indices are told apart from 2^-40 to 1."""

EVENTS, OCCUPANTS, EXPOSURE, SINCE, RATE, INDEX, NUM_COLUMNS = range(7)
"""Columns of the cells' statistics, float64 ``(cell, 6)``: reuses; pages there; exposure until the
time in the next column; that time; rate; Gittins index. The first three count requests: each page
of a request of n is an nth, since all of them are used again, or are not, together."""


@kernel
def age_ends(ends: Any) -> None:
    """Fill in when each age ends, float64 ``(NUM_AGES,)``; the last one never does."""
    end = FIRST_AGE
    for age in range(NUM_AGES):
        ends[age] = end
        end *= np.sqrt(2.0)


@kernel
def class_of(seen: Any, known: Any, length: Any, place: Any) -> Any:
    """The class of a page.

    Args:
        seen: How often it was used while it was remembered, this time included.
        known: Leading pages of the request that were remembered.
        length: Pages of the request.
        place: Number of the page in the request.
    """
    if seen == 1 and length > 1 and place == length - 1:
        return 0
    step = 0
    most = 1
    while seen > most and step < SEEN - 1:
        most *= 2
        step += 1
    quarter = min(KNOWN - 1, KNOWN * known // length)
    size = 0
    bound = 6
    while length >= bound and size < LENGTH - 1:
        bound *= 3
        size += 1
    return 1 + (step * KNOWN + quarter) * LENGTH + size


@kernel
def _level(label: Any, factor: Any) -> Any:
    """The level of a class in a feature, -1 where the feature does not apply."""
    if label == 0:
        return 0 if factor == 0 else -1
    label -= 1
    if factor == 0:
        return 1
    if factor == 1:
        return label // (KNOWN * LENGTH)
    if factor == 2:
        return label // LENGTH % KNOWN
    return label % LENGTH


@kernel
def learn(statistics: Any, factors: Any, ends: Any, now: Any) -> None:
    """Bring rates and indices up to date, and let old counts fade.

    Args:
        statistics: Of the cells, float64 ``(NUM_CELLS, NUM_COLUMNS)``.
        factors: Of the log-linear model, float64 ``(NUM_FACTORS, SEEN, NUM_GROUPS)``.
        ends: As ``age_ends`` fills it.
        now: The time, in pages requested.
    """
    base = np.empty(NUM_AGES)
    for age in range(NUM_AGES):
        events = 0.0
        exposure = 0.0
        for label in range(NUM_CLASSES):
            cell = label * NUM_AGES + age
            row = statistics[cell]
            row[EXPOSURE] += row[OCCUPANTS] * (now - row[SINCE])
            row[SINCE] = now
            events += row[EVENTS]
            exposure += row[EXPOSURE]
        start = 0.0 if age == 0 else ends[age - 1]
        prior = _PRIOR_RATE / ((start + ends[age]) / 2 + 500.0)
        base[age] = (events + _PRIOR_EVENTS) / (exposure + _PRIOR_EVENTS / prior)
    scales = np.empty((NUM_CLASSES, NUM_GROUPS))
    for factor in range(NUM_FACTORS):
        _scale(factors, scales)
        _fit(statistics, factors, factor, base, scales)
    _scale(factors, scales)
    for label in range(NUM_CLASSES):
        for age in range(NUM_AGES):
            row = statistics[label * NUM_AGES + age]
            rate = base[age] * scales[label, age // _GROUP]
            row[RATE] = (row[EVENTS] + _PRIOR_EVENTS) / (row[EXPOSURE] + _PRIOR_EVENTS / rate)
            row[EVENTS] *= _DECAY
            row[EXPOSURE] *= _DECAY
        _gittins(statistics[label * NUM_AGES : (label + 1) * NUM_AGES], ends)


@kernel
def _scale(factors: Any, scales: Any) -> None:
    """Fill in what the log-linear model multiplies the rates of the ages with."""
    for label in range(NUM_CLASSES):
        scales[label] = 1.0
        for factor in range(NUM_FACTORS):
            level = _level(label, factor)
            if level >= 0:
                for group in range(NUM_GROUPS):
                    scales[label, group] *= factors[factor, level, group]


@kernel
def _fit(statistics: Any, factors: Any, factor: Any, base: Any, scales: Any) -> None:
    """Scale the factors of one feature to the reuses that were seen."""
    seen = np.full((SEEN, NUM_GROUPS), _PRIOR_EVENTS)
    expected = np.full((SEEN, NUM_GROUPS), _PRIOR_EVENTS)
    for label in range(NUM_CLASSES):
        level = _level(label, factor)
        if level < 0:
            continue
        for age in range(NUM_AGES):
            group = age // _GROUP
            row = statistics[label * NUM_AGES + age]
            seen[level, group] += row[EVENTS]
            expected[level, group] += row[EXPOSURE] * base[age] * scales[label, group]
    for level in range(SEEN):
        for group in range(NUM_GROUPS):
            factors[factor, level, group] *= seen[level, group] / expected[level, group]


@kernel
def rank(statistics: Any, order: Any) -> None:
    """Sort the cells by index, in steps of four in the hundred: a counting sort takes no time.

    Args:
        statistics: Of the cells.
        order: The cells, the lowest index first, int32 ``(NUM_CELLS,)``; filled in.
    """
    steps = np.empty(NUM_CELLS, np.int32)
    starts = np.zeros(_NUM_STEPS + 1, np.int32)
    for cell in range(NUM_CELLS):
        step = int(_STEPS_AN_OCTAVE * (np.log2(statistics[cell, INDEX]) + _OCTAVES))
        steps[cell] = min(max(step, 0), _NUM_STEPS - 1)
        starts[steps[cell] + 1] += 1
    for step in range(_NUM_STEPS):
        starts[step + 1] += starts[step]
    for cell in range(NUM_CELLS):
        order[starts[steps[cell]]] = cell
        starts[steps[cell]] += 1


@kernel
def _gittins(rows: Any, ends: Any) -> None:
    """Fill in the indices of one class, whose cells are ``rows``, from its rates."""
    used = np.empty(NUM_AGES)  # the chance of a reuse in an age, of who reaches it
    spent = np.empty(NUM_AGES)  # the expected time in it
    start = 0.0
    for age in range(NUM_AGES - 1):
        used[age] = -np.expm1(-rows[age, RATE] * (ends[age] - start))
        spent[age] = used[age] / rows[age, RATE]
        start = ends[age]
    used[NUM_AGES - 1] = 1.0
    spent[NUM_AGES - 1] = 1 / rows[NUM_AGES - 1, RATE]
    for age in range(NUM_AGES - 1, -1, -1):
        left = 1.0 - used[age]
        chance = used[age]
        time = spent[age]
        later = age + 1
        while later < NUM_AGES and rows[later, INDEX] * time > chance:  # worth going on
            chance += left * used[later]
            time += left * spent[later]
            left -= left * used[later]
            later += 1
        rows[age, INDEX] = chance / time
