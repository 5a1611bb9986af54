// The newest tokens of a request as a run of small boxes, the newest at the right and never cut off.
import { fillChildren, make, setAttribute, setProperty, setText } from "./panel_make.js";

export function makeTokens() { return make("div", { className: "wb-tokens" }, make("div", { className: "wb-tokens-run" })); }

export function showTokens(place, row) {
  const { tokens, num_new: numNew } = row;
  fillChildren(place.firstChild, tokens, () => make("span"), (box, text, at) => {
    const isNew = at >= tokens.length - numNew, isLast = at === tokens.length - 1;
    setText(box, text);
    setProperty(box, "title", titleText(row, at));
    setAttribute(box, "data-new", isNew ? "true" : null);
    setAttribute(box, "data-last", isLast ? "true" : null);
  });
}

function titleText({ tokens, token_ids: ids, logprobs, output_tokens: count }, at) {
  const logprob = logprobs[at], told = `id ${ids[at]}, output ${count - tokens.length + at}`;
  return logprob === undefined || logprob === null ? told : `${told}, log-probability ${logprob.toFixed(4)}`;
}
