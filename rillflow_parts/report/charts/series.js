// Sequences of a curve: smoothing, breaks between phases, values for a logarithmic axis, the nearest point.
//
//   curve {x, y, low, high} ─ broken at phases ─ smoothed ─ positive ─ joined ─> one table for uPlot

export const LARGEST = 1e100; // larger values overflow in the arithmetic of an axis

// Return whether a value can be drawn.
export function drawable(value) {
  return value !== null && value !== undefined && Math.abs(value) < LARGEST;
}

// Return a curve with an empty point before each phase but the first, so that no line crosses the border,
// and with null for every value that cannot be drawn.
export function broken(curve, phases) {
  const keys = ["y", "low", "high"].filter((key) => curve[key]);
  const found = { ...curve, x: [], ...Object.fromEntries(keys.map((key) => [key, []])) };
  const borders = phases.slice(1).map((phase) => phase.first - 0.5);
  let border = 0;
  curve.x.forEach((x, place) => {
    for (; border < borders.length && borders[border] < x; border++) {
      if (found.x.length === 0) continue;
      found.x.push(borders[border]);
      for (const key of keys) found[key].push(null);
    }
    found.x.push(x);
    for (const key of keys) found[key].push(drawable(curve[key][place]) ? curve[key][place] : null);
  });
  return found;
}

// Return the exponential moving average of a curve; it starts anew after every gap.
//
// A point d units of x after the last one keeps (1 - 2 / (span + 1)) ** (d / unit) of the old average. So a curve
// of means over ten steps is smoothed as the ten single steps would be.
export function smoothed(x, y, span, unit) {
  const keep = Math.max(0, 1 - 2 / (span + 1));
  let sum = 0,
    weight = 0,
    last = null;
  return y.map((value, place) => {
    if (value === null || value === undefined) {
      sum = weight = 0;
      last = null;
      return value;
    }
    const old = keep ** (last === null ? 1 : Math.max(0, x[place] - last) / unit);
    sum = sum * old + value * (1 - old);
    weight = weight * old + (1 - old);
    last = x[place];
    return weight > 0 ? sum / weight : value;
  });
}

// Return the span of the automatic smoothing: a sixtieth of the steps, in round numbers; 0 for a short curve.
export function automatic(steps) {
  if (steps <= 40) return 0;
  const rough = steps / 60;
  const power = 10 ** Math.floor(Math.log10(rough));
  return Math.max(2, power * [1, 2, 5, 10].find((factor) => power * factor >= rough));
}

// Return values for a logarithmic axis: 0 becomes the smallest positive value, a negative value a gap.
export function positive(values, least) {
  return values.map((value) =>
    value === null || value === undefined ? value : value < 0 ? null : Math.max(value, least),
  );
}

// Return the smallest positive value of some lists; null without one.
export function leastPositive(lists) {
  let least = Infinity;
  for (const list of lists)
    for (const value of list) if (value !== null && value > 0 && value < least) least = value;
  return least === Infinity ? null : least;
}

// Return the place of the point nearest to `at` that has a value; -1 without one.
export function nearest(x, y, at) {
  let low = 0,
    high = x.length;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (x[middle] < at) low = middle + 1;
    else high = middle;
  }
  let left = low - 1,
    right = low;
  while (left >= 0 && !drawable(y[left])) left--;
  while (right < x.length && !drawable(y[right])) right++;
  if (left < 0) return right < x.length ? right : -1;
  if (right >= x.length) return left;
  return at - x[left] <= x[right] - at ? left : right;
}
