// One line under the buttons: what the last command had to say, until the next one or until it is taken away.
import { make, makeButton, setAttribute, setProperty, setText } from "./panel_make.js";

const MARKS = { info: "ℹ", error: "✕" };

export class NoticeLine {
  constructor(hint) {
    this.dismissed = null;
    this.notice = {};
    this.mark = make("span", { className: "wb-mark", attributes: { "aria-hidden": "true" } });
    this.text = make("span", { className: "wb-notice-text", attributes: { role: "status", "aria-live": "polite" } });
    this.detail = make("pre", { className: "wb-detail", hidden: true, tabIndex: 0, attributes: { "aria-label": "Traceback" } });
    this.more = makeButton("Detail", "Show the traceback", () => this.open(this.detail.hidden));
    this.close = makeButton("×", "Take this notice away", () => this.dismiss(), { name: "Dismiss the notice" });
    this.rest = make("span", { className: "wb-rest", textContent: hint });
    this.line = make("div", { className: "wb-notice-line" }, this.mark, this.text, this.rest, this.more, this.close);
    this.box = make("div", {}, this.line, this.detail);
    this.show({});
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
