// The timeline on VC-Attention Patch: plain DOM, so that the same element serves the canvas and the Vue nodes, zooms
// with them, and can be read and reached by keyboard.

import { cellsOf } from "./results.js";
import { expected } from "./schedule.js";
import * as texts from "./texts.js";
import { applyTheme } from "./theme.js";

const NEVER = 2;
const BYPASS = 4;
/** From here on, neighbouring steps of one phase share a cell: a pixel is the least a cell can have. */
const CELLS = 200;

let count = 0;

function make(tag, className, text) {
    const element = document.createElement(tag);
    if (className) element.className = className;
    if (text !== undefined) element.textContent = text;
    return element;
}

/** The values of the node's own widgets by name. */
export function optionsOf(node) {
    return Object.fromEntries((node.widgets ?? []).map((widget) => [widget.name, widget.value]));
}

/**
 * What the timeline shows: { state, rows: [{ title, cells }], sentence, card, path, reason, declined, notes }.
 *
 * node: ours. found: as findSamplers gives it. result: as resultOf gives it, or undefined. signature: of the settings.
 */
export function describe(node, found, result, signature) {
    const options = optionsOf(node);
    const expectedState = texts.text("states.expected");
    const view = { state: expectedState, rows: [], sentence: "", declined: [], notes: [] };
    const ready = result?.ready;
    view.card = ready?.card ?? "";
    // The path and what is against it follow from the settings; the card stays.
    const current = result?.signature === signature;
    view.path = current ? (ready?.engine ?? "") : "";
    view.reason = current && ready?.code ? ready : null;
    const runs = [...(result?.runs.values() ?? [])];
    const last = runs.at(-1);
    if (last && current) {
        view.state = texts.text(`states.${last.state}`) ?? texts.text("states.done");
        view.rows = runs.map((run) => ({
            title: runs.length > 1 ? texts.text("run", { number: run.run }) : view.state,
            cells: cellsOf(run),
        }));
        view.card = last.card;
        view.path = last.engine || view.path;
        view.declined = last.declined;
        view.notes = last.notes.filter((note) => note !== view.reason?.text);
        return view;
    }
    if (last) view.notes = [texts.text("notes.changed")];
    if (node.mode === NEVER) view.sentence = texts.text("notes.muted");
    else if (node.mode === BYPASS) view.sentence = texts.text("notes.bypassed");
    else if (options.precision === "off") view.sentence = texts.text("notes.off");
    else if (found.replacedBy !== null) view.sentence = texts.text("notes.replaced", { title: found.replacedBy });
    else if (!found.samplers.length) view.sentence = texts.text("notes.noSampler");
    else if (found.samplers.some((sampler) => sampler.noise === null)) view.sentence = texts.text("notes.unknownSteps");
    const used = node.mode === BYPASS ? { ...options, precision: "off" } : options;
    if (node.mode !== NEVER) {
        view.rows = found.samplers
            .filter((sampler) => sampler.noise?.length > 1)
            .map((sampler) => ({
                title: found.samplers.length > 1 ? sampler.title : expectedState,
                cells: expected(sampler.noise, used).map((phase) => ({ phase, state: "planned" })),
            }));
    }
    return view;
}

/** The element of one node. help: address of the help page, to which the locale and "#code" are added. */
export class Timeline {
    constructor(help, onResize = () => {}) {
        this.help = help;
        this.onResize = onResize;
        this.height = 66;
        this.shown = "";
        this.element = make("div", "vc-attention");
        this.element.setAttribute("role", "group");
        this.inner = make("div", "vca-inner");
        this.element.append(this.inner);
        this.rows = make("div", "vca-rows");
        this.head = make("div", "vca-head");
        this.legend = make("div", "vca-legend");
        this.detail = make("div", "vca-detail");
        this.detail.setAttribute("role", "status");
        this.badge = make("div", "vca-badge");
        this.list = make("ul", "vca-declined");
        this.inner.append(this.head, this.rows, this.legend, this.detail, this.badge, this.list);
        this.watcher = new ResizeObserver(() => this.measure());
        this.watcher.observe(this.inner);
    }

    /** Show `view`, as `describe` gives it; nothing is touched when it is what is there already. */
    show(view) {
        const key = JSON.stringify([texts.languageOf(), texts.text("label"), view]);
        if (key === this.shown) return;
        this.shown = key;
        this.element.setAttribute("aria-label", texts.text("label"));
        const phases = view.rows.flatMap((row) => row.cells.map((cell) => cell.phase));
        this.head.replaceChildren(
            make("span", "vca-state", phases.length ? this.headText(phases.length, view.state) : view.state),
        );
        if (view.card) this.head.append(make("span", "vca-card", view.card));
        this.showRows(view.rows);
        this.legend.replaceChildren(
            ...texts.tally(phases).map(([phase, n]) => {
                const entry = make("span", "vca-entry");
                const mark = make("span", "vca-mark");
                mark.dataset.phase = phase;
                mark.setAttribute("aria-hidden", "true");
                entry.append(mark, texts.text("legend", { phase: texts.phaseName(phase), count: n }));
                return entry;
            }),
        );
        this.say([view.sentence, ...view.notes].filter(Boolean).join(" "));
        this.showBadge(view);
        this.showDeclined(view.declined);
        this.measure();
    }

    headText(count, state) {
        return texts.text("head", { steps: texts.steps(count), state });
    }

    say(sentence) {
        this.sentence = sentence;
        this.tell(sentence);
    }

    tell(text) {
        this.detail.textContent = text;
        this.detail.hidden = !text;
    }

    showRows(rows) {
        const at = [...this.rows.children].findIndex((row) => row === document.activeElement);
        this.rows.replaceChildren(...rows.map((row) => this.row(row)));
        if (at >= 0) this.rows.children[at]?.focus();
    }

    /** One sampler run: a list of steps, in which the arrow keys move. */
    row({ title, cells }) {
        const row = make("div", "vca-row");
        row.setAttribute("role", "listbox");
        row.setAttribute("aria-orientation", "horizontal");
        row.setAttribute("aria-label", texts.rowText(title, cells.map((cell) => cell.phase)));
        row.tabIndex = 0;
        const prefix = `vca-${++count}`;
        const merged = cells.length > CELLS ? merge(cells) : cells.map((cell, i) => ({ ...cell, first: i, length: 1 }));
        row.append(...merged.map((cell, i) => this.cell(cell, `${prefix}-${i}`)));
        const select = (index) => {
            const chosen = row.children[Math.min(Math.max(index, 0), row.children.length - 1)];
            for (const cell of row.children) cell.setAttribute("aria-selected", String(cell === chosen));
            row.setAttribute("aria-activedescendant", chosen.id);
            this.tell(chosen.title);
        };
        const current = () => [...row.children].findIndex((cell) => cell.getAttribute("aria-selected") === "true");
        const leave = () => {
            for (const cell of row.children) cell.setAttribute("aria-selected", "false");
            row.removeAttribute("aria-activedescendant");
            this.tell(this.sentence);
        };
        row.addEventListener("keydown", (event) => {
            const next = {
                ArrowRight: current() + 1,
                ArrowLeft: current() - 1,
                Home: 0,
                End: row.children.length - 1,
            }[event.key];
            if (next === undefined) return;
            event.preventDefault();
            event.stopPropagation();
            select(next);
        });
        row.addEventListener("pointerover", (event) => {
            const index = [...row.children].indexOf(event.target);
            if (index >= 0) select(index);
        });
        row.addEventListener("pointerleave", leave);
        row.addEventListener("blur", leave);
        return row;
    }

    cell({ phase, state, first, length }, id) {
        const cell = make("div", "vca-cell");
        cell.id = id;
        cell.dataset.phase = phase;
        cell.dataset.state = state;
        cell.style.flexGrow = length;
        cell.setAttribute("role", "option");
        cell.setAttribute("aria-selected", "false");
        const text = texts.stepText(first, phase, state);
        cell.title = length > 1 ? texts.text("upToStep", { step: text, number: first + length }) : text;
        cell.setAttribute("aria-label", cell.title);
        return cell;
    }

    showBadge({ path, reason }) {
        this.badge.replaceChildren();
        this.badge.hidden = !path && !reason;
        if (path) this.badge.append(make("span", "vca-path", path));
        if (reason) {
            const words = make("span", "vca-reason", `${reason.text} `);
            words.append(this.link(reason.code, texts.text("whatToDo"), reason.text));
            this.badge.append(words);
        }
    }

    showDeclined(declined) {
        this.list.hidden = !declined.length;
        this.list.replaceChildren(
            ...declined.map(({ code, words, count }) => {
                const [before, behind] = texts.declinedAround(count);
                const item = make("li", "", before);
                const own = texts.reasonWords(code, words);
                item.append(this.link(code, own, own), behind);
                return item;
            }),
        );
    }

    link(code, text, title) {
        const link = make("a", "vca-link", text);
        link.href = `${this.help}?locale=${encodeURIComponent(texts.languageOf())}#${code}`;
        link.target = "_blank";
        link.rel = "noopener";
        link.title = texts.text("link", { words: title });
        return link;
    }

    /** The height that the content takes, for the frontend's layout of the node. */
    measure() {
        if (!this.element.isConnected) return;
        if (!this.element.dataset.theme) this.theme();
        const height = Math.ceil(this.inner.offsetHeight);
        if (height < 10 || height === this.height) return;
        this.height = height;
        this.onResize();
    }

    theme() {
        if (this.element.isConnected) applyTheme(this.element);
    }

    remove() {
        this.watcher.disconnect();
        this.element.remove();
    }
}

/** Neighbouring cells of one phase and state as one. */
function merge(cells) {
    const merged = [];
    cells.forEach((cell, i) => {
        const last = merged.at(-1);
        if (last && last.phase === cell.phase && last.state === cell.state) last.length += 1;
        else merged.push({ ...cell, first: i, length: 1 });
    });
    return merged;
}
