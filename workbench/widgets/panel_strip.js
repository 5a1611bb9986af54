// The order of the iteration in hand: its phases left to right, where it stands, why it took this order.
import { fillChildren, keepChildren, make, setAttribute, setProperty, setStyle, setText } from "./panel_make.js";
import { showColour } from "./panel_hues.js";

// Mark and words of each state: none is told by colour alone.
const STATES = { done: ["✓", "done"], last: ["●", "ran last"], next: ["▶", "next"], coming: ["", "to come"] };

export class Strip {
  constructor() {
    this.order = make("span", { className: "wb-order" });
    this.title = make("span", { className: "wb-strip-title" });
    this.forwards = make("ul", { className: "wb-forwards", attributes: { "aria-label": "Forwards" } });
    this.cells = make("ol", { className: "wb-phases", attributes: { "aria-label": "Phases of the order" } });
    this.next = make("b", { className: "wb-next" });
    this.why = make("span", { className: "wb-why" });
    this.box = make("section", { className: "wb-strip", attributes: { "aria-label": "Order of the iteration" } },
      make("div", { className: "wb-strip-head" }, this.order, this.title, this.forwards), this.cells,
      make("p", { className: "wb-strip-foot" }, this.next, this.why));
  }

  show(view) {
    const { phases = [], forwards = [] } = view;
    setText(this.order, view.order || "no order yet");
    if (view.order) showColour(this.order, view.colour); else setAttribute(this.order, "data-painted", null);
    setText(this.title, titleText(view));
    setProperty(this.title, "title", view.reason || "");
    setText(this.why, view.why);
    setText(this.next, nextText(view));
    setProperty(this.next, "hidden", this.next.textContent === "");
    setAttribute(this.cells, "data-in-hand", view.is_in_hand ? "true" : "false");
    fillChildren(this.cells, phases, makePhase, showPhase);
    keepChildren(this.forwards, forwards, ({ role }) => role, makeForward, showForward);
  }
}

function titleText({ iteration, is_in_hand: isInHand }) {
  if (iteration === null || iteration === undefined) return "before the first iteration";
  return `iteration ${iteration.toLocaleString("en")}${isInHand ? "" : ", ended"}`;
}

// Before the sentence on an iteration to come; where none can come, the sentence says all.
function nextText({ next_phase: phase, is_in_hand: isInHand }) { return isInHand || !phase ? "" : `Next, from ${phase} on: `; }

function makePhase() {
  const parts = ["wb-phase-mark", "wb-phase-name", "wb-phase-state"].map((className) => make("span", { className }));
  return make("li", { className: "wb-phase" }, ...parts);
}

function showPhase(cell, { name, colour, state, title }) {
  const [mark, label, words] = cell.children, [sign, said] = STATES[state];
  showColour(cell, colour);
  setAttribute(cell, "data-state", state);
  setAttribute(cell, "aria-current", state === "last" ? "step" : null);
  setProperty(cell, "title", title);
  setText(mark, sign);
  setText(label, name);
  setText(words, said);
}

const ROLES = {
  sampled: ["The forward being sampled", "launched by"],
  prepared: ["The forward that is prepared", "to be launched by"],
  pending: ["The pending forward", "launched by"],
  last: ["The forward launched last", "launched by"],
};
const SHARES = ["decode", "prompt", "padding"];  // of the tokens that a forward may have

function makeForward() {
  const meter = make("span", { className: "wb-budget", attributes: { "aria-hidden": "true" } }, ...SHARES.map((name) => make("i", { className: `wb-budget-${name}` })));
  return make("li", {}, make("b"), meter, make("span"));
}

function showForward(item, { role, iteration, on_device: onDevice, text, budget }) {
  const [who, launched] = ROLES[role], [name, meter, words] = item.children;
  const used = SHARES.filter((share) => budget[share]).map((share) => `${budget[share].toLocaleString("en")} ${share}`).join(" + ");
  setText(name, `${role}: forward ${iteration.toLocaleString("en")}${onDevice ? ` ${onDevice}` : ""}`);
  SHARES.forEach((share, place) => setStyle(meter.children[place], "width", `${100 * budget[share] / budget.limit}%`));
  setText(words, `${used} of ${budget.limit.toLocaleString("en")} tokens · ${text}`);
  setAttribute(item, "data-role", role);
  setProperty(item, "title", `${who}, ${launched} iteration ${iteration}${onDevice ? `, on the device: ${onDevice}` : ""}: ${text}. It uses ${used} of max_batch_tokens=${budget.limit}.`);
}
