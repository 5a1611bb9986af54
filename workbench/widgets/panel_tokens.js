// The newest tokens of a request as a run of small boxes, the newest at the right and never cut off.
import { counted, fillChildren, make, setAttribute, setProperty, setText } from "./panel_make.js";

const LEAST_BOX = 12;  // px of a box at least, with what is between two

// Boxes that fill so many pixels, and one that is cut: those behind it at the left would not be seen, and each of them
// takes the page as long as one that is.
export function roomFor(width) { return Math.ceil(width / LEAST_BOX) + 1; }

export function makeTokens() {
  return make("div", { className: "wb-tokens" }, make("div", { className: "wb-tokens-run" }), make("span", { className: "wb-rejected" }));
}

export function showTokens(place, row, room = Infinity) {
  const { tokens, num_new: numNew, num_rejected: numRejected } = row, accepted = new Set(row.accepted);
  const first = Math.max(0, tokens.length - room);
  fillChildren(place.firstChild, tokens.slice(first), () => make("span"), (box, text, inRoom) => {
    const at = first + inRoom, isNew = at >= tokens.length - numNew, isLast = at === tokens.length - 1;
    setText(box, text);
    setProperty(box, "title", titleText(row, at));
    setAttribute(box, "data-new", isNew ? "true" : null);
    setAttribute(box, "data-last", isLast ? "true" : null);
    setAttribute(box, "data-draft", accepted.has(at) ? "accepted" : null);
  });
  setText(place.lastChild, numRejected ? `✕${numRejected}` : "");
  setProperty(place.lastChild, "hidden", !numRejected);
  setProperty(place.lastChild, "title", numRejected ? `${counted(numRejected, "draft")} turned down by the newest verification; ${row.drafts}` : "");
}

function titleText({ tokens, token_ids: ids, logprobs, output_tokens: count, accepted }, at) {
  const how = accepted.includes(at) ? ", an accepted draft" : "";
  const logprob = logprobs[at], told = `id ${ids[at]}, output ${count - tokens.length + at}${how}`;
  return logprob === undefined || logprob === null ? told : `${told}, log-probability ${logprob.toFixed(4)}`;
}
