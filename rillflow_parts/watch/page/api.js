// Requests to the server. An error has what, why and fix, as the server's errors do.

export class ApiError extends Error {
  constructor({ what, why, fix }) {
    super(what);
    this.why = why ?? "";
    this.fix = fix ?? "";
  }
}

// Join names by commas; a comma inside a name is written as %2C, so each part is to be decoded after the split.
export function joinNames(names) {
  return names.map((name) => name.replaceAll("%", "%25").replaceAll(",", "%2C")).join(",");
}

// Return the JSON of an address: get("curves", { runs: ["a", "b"], x: "step" }). Empty parameters are left out.
export async function get(path, parameters = {}, signal = undefined) {
  const query = new URLSearchParams();
  for (const [name, value] of Object.entries(parameters)) {
    const text = Array.isArray(value) ? joinNames(value) : value;
    if (text !== "" && text !== null && text !== undefined) query.set(name, text);
  }
  let answer;
  try {
    answer = await fetch(`/api/${path}${query.size > 0 ? `?${query}` : ""}`, {
      signal,
      headers: { Accept: "application/json" },
    });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new ApiError({
      what: "the server does not answer",
      why: error.message,
      fix: "start rillflow watch again",
    });
  }
  let found = null;
  try {
    found = await answer.json();
  } catch (error) {
    if (error.name === "AbortError") throw error;
  }
  if (!answer.ok || found === null) {
    const fix = answer.status === 401 ? "open the address with the token that rillflow watch printed" : "";
    throw new ApiError(
      found?.error ?? { what: `the server answered ${answer.status}`, why: answer.statusText, fix },
    );
  }
  return found;
}
