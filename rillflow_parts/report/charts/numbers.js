// Format numbers for people, in the forms of runs/formatting.py.

// Three digits: 0.0123, 12,345, 1.2e-5.
export function number(value) {
  if (value === null || value === undefined) return "none";
  if (!Number.isFinite(value))
    return Number.isNaN(value) ? "not a number" : `${value < 0 ? "-" : ""}infinite`;
  const size = Math.abs(value);
  if (size === 0) return "0";
  if (size >= 1e15) return value.toExponential(2);
  if (size >= 1000) return grouped(Math.round(value));
  if (size < 1e-3) return value.toExponential(1);
  return value.toFixed(Math.max(0, 2 - Math.floor(Math.log10(size))));
}

// A whole number with thousands separated: 12,345.
export function grouped(value) {
  return Math.round(value).toLocaleString("en-US");
}

// A label of an axis: as many digits as it needs.
export function tick(value) {
  const size = Math.abs(value);
  if (size !== 0 && (size < 1e-3 || size >= 1e6))
    return String(Number(value.toPrecision(6)).toExponential()).replace("e+", "e");
  return Number(value.toPrecision(12)).toLocaleString("en-US", { maximumFractionDigits: 12 });
}

// Two units: 1 min 15 s, 250 ms.
export function duration(seconds) {
  if (seconds < 0.9995) return `${Math.round(seconds * 1000)} ms`;
  if (seconds < 9.95) return `${seconds.toFixed(1)} s`;
  const whole = Math.round(seconds);
  if (whole < 60) return `${whole} s`;
  const two = (part) => String(part).padStart(2, "0");
  if (whole < 3600) return `${Math.floor(whole / 60)} min ${two(whole % 60)} s`;
  return `${Math.floor(whole / 3600)} h ${two(Math.floor((whole % 3600) / 60))} min`;
}

// "1 token", "2 tokens", "1,234 tokens".
export function counted(count, word) {
  return `${grouped(count)} ${word}${count === 1 ? "" : "s"}`;
}
