// The newest tokens of a request as a run of small boxes, the newest at the right and never cut off.
import { fillChildren, make, setAttribute, setProperty, setText } from "./panel_make.js";

export function makeTokens() { return make("div", { className: "wb-tokens" }, make("div", { className: "wb-tokens-run" })); }

export function showTokens(place, { tokens, num_new: numNew }) {
  fillChildren(place.firstChild, tokens, () => make("span"), (box, token, at) => {
    const isNew = at >= tokens.length - numNew, isLast = at === tokens.length - 1;
    setText(box, token.text);
    setProperty(box, "title", token.title);
    setAttribute(box, "data-new", isNew ? "true" : null);
    setAttribute(box, "data-last", isLast ? "true" : null);
  });
}
