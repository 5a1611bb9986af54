// The newest tokens of a request as a run of small boxes, the newest at the right and never cut off; behind it, struck
// through, the drafts that the newest verification turned down.
import { fillChildren, make, setAttribute, setProperty, setText } from "./panel_make.js";

const LEAST_BOX = 12;  // px of a box at least, with what is between two

// Boxes that fill so many pixels, and one that is cut: those behind it at the left would not be seen, and each of them
// takes the page as long as one that is.
export function roomFor(width) { return Math.ceil(width / LEAST_BOX) + 1; }

export function makeTokens() {
  return make("div", { className: "wb-tokens" }, make("div", { className: "wb-tokens-run" }), make("span", { className: "wb-rejected", hidden: true }));
}

export function showTokens(place, row, room = Infinity) {
  const { tokens, num_new: numNew } = row, last = tokens.length - 1, accepted = new Set(row.accepted);
  const rejected = new Map(row.rejected.map((drafts) => [drafts.at, drafts]));
  const first = Math.max(0, tokens.length - room);
  fillChildren(place.firstChild, tokens.slice(first), () => make("span"), (box, text, inRoom) => {
    const at = first + inRoom, isNew = at >= tokens.length - numNew, isLast = at === last;
    setText(box, text);
    setProperty(box, "title", titleText(row, at, rejected.get(at)));
    setAttribute(box, "data-new", isNew ? "true" : null);
    setAttribute(box, "data-last", isLast ? "true" : null);
    setAttribute(box, "data-draft", accepted.has(at) ? "accepted" : rejected.has(at) ? "instead" : null);
  });
  showRejected(place.lastChild, numNew ? rejected.get(last) : undefined, tokens[last]);
}

function showRejected(place, drafts, drawn) {
  fillChildren(place, drafts ? drafts.tokens : [], () => make("s"), (box, text, behind) => {
    setText(box, text);
    setProperty(box, "title", rejectedText(drafts, behind, drawn));
  });
  setProperty(place, "hidden", !drafts);
}

function rejectedText({ place, token_ids: ids }, behind, drawn) {
  const why = behind ? `: it follows draft ${place}, and the model drew ${drawn} instead of that` : `: the model drew ${drawn} instead`;
  return `draft ${place + behind} was turned down${why}; id ${ids[behind]}`;
}

function titleText({ tokens, token_ids: ids, logprobs, output_tokens: count, accepted }, at, rejected) {
  const how = accepted.includes(at) ? ", an accepted draft" : rejected ? `, drawn instead of ${draftsText(rejected)}` : "";
  const logprob = logprobs[at], told = `id ${ids[at]}, output ${count - tokens.length + at}${how}`;
  return logprob === undefined || logprob === null ? told : `${told}, log-probability ${logprob.toFixed(4)}`;
}

function draftsText({ place, tokens: [first, ...others] }) {
  const behind = others.length ? `, which ${others.map((text, at) => `draft ${place + 1 + at} (${text})`).join(" and ")} followed` : "";
  return `draft ${place} (${first})${behind}`;
}
