// One line under the buttons: what the last command had to say, until the next one, until the session has moved on without
// the panel, or until it is taken away; else why the last run stopped, or what keys do.
import { make, makeButton, setAttribute, setCutText, setProperty, setText } from "./panel_make.js";

const MARKS = { info: "ℹ", error: "✕" };

export class NoticeLine {
  constructor(hint) {
    this.hint = hint;
    this.dismissed = null;
    this.stopped = "";
    this.notice = {};
    this.mark = make("span", { className: "wb-mark", attributes: { "aria-hidden": "true" } });
    this.text = make("span", { className: "wb-notice-text", attributes: { role: "status", "aria-live": "polite" } });
    this.detail = make("pre", { className: "wb-detail", hidden: true, tabIndex: 0, attributes: { "aria-label": "Traceback" } });
    this.more = makeButton("Detail", "Show the traceback", () => this.open(this.detail.hidden));
    this.close = makeButton("×", "Take this notice away", () => this.dismiss(), { name: "Dismiss the notice" });
    this.rest = make("span", { className: "wb-rest" });
    this.typing = makeButton("Typing goes to the cell: click here for keys", "An editor outside the panel has the focus. A click anywhere on the panel takes it", () => {}, { className: "wb-typing" });
    this.typing.hidden = true;
    this.line = make("div", { className: "wb-notice-line" }, this.mark, this.text, this.rest, this.more, this.close, this.typing);
    this.show({});
  }

  // Without words: what was done shows itself, and what was said before still stands.
  hear(notice) { if (notice.text || !notice.number) this.show(notice); }

  tellTyping(isTyping) { setProperty(this.typing, "hidden", !isTyping); }

  // Where the session stands now, and why the last run stopped there.
  age({ state, place, stopped }) {
    this.stopped = stopped || "";
    const { notice } = this;
    if (notice.text && notice.place !== undefined && state !== "running" && notice.place !== place) this.dismissed = notice.number;
    this.show(notice);
  }

  show(notice) {
    const isNew = notice.number !== this.notice.number;
    this.notice = notice;
    const isShown = Boolean(notice.text) && notice.number !== this.dismissed;
    setAttribute(this.line, "data-level", isShown ? notice.level : null);
    setText(this.mark, isShown ? MARKS[notice.level] : "");
    setAttribute(this.text, "aria-live", notice.level === "error" ? "assertive" : "polite");
    if (isNew) this.text.textContent = "";  // the same words again are said again
    setText(this.text, isShown ? notice.text : "");
    setProperty(this.text, "title", isShown ? notice.text : "");
    setCutText(this.rest, this.stopped || this.hint);
    setProperty(this.rest, "hidden", isShown);
    setProperty(this.more, "hidden", !isShown || !notice.detail);
    setProperty(this.close, "hidden", !isShown);
    setText(this.detail, isShown ? notice.detail : "");
    if (isNew || !isShown) this.open(false);
  }

  open(isOpen) {
    this.detail.hidden = !isOpen;
    setAttribute(this.more, "aria-expanded", String(isOpen));
    setText(this.more, isOpen ? "Less" : "Detail");
    setAttribute(this.more, "aria-label", this.more.textContent);
  }

  dismiss() {
    this.dismissed = this.notice.number;
    this.show(this.notice);
  }
}
