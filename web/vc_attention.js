// VC-Attention in the browser: a timeline on VC-Attention Patch, filled by the server while a run goes on. Nodes of
// other packs are neither changed nor hooked; the graph is only read.

import { app } from "../../scripts/app.js";
import { api } from "../../scripts/api.js";
import { findSamplers, OURS } from "./vc_attention/graph.js";
import { keep, resultOf } from "./vc_attention/results.js";
import { setLanguage, setTranslations } from "./vc_attention/texts.js";
import { describe, optionsOf, Timeline } from "./vc_attention/timeline.js";

const EVENT = "vc_attention.run";
const WIDGET = "vc_attention_timeline";
const HELP = new URL("./help.html", import.meta.url).href;
/** Milliseconds between two looks at the graph: other nodes' widgets tell nobody that they changed. */
const PERIOD = 300;
const MARGIN = 10;

/** Our nodes that are on the canvas, with their timelines. */
const shown = new Map();

function rootGraph() {
    return app.rootGraph ?? app.graph?.rootGraph ?? app.graph;
}

/** A name for a node that outlives its being made anew: of its workflow, its graph and itself. */
function keyOf(node) {
    const root = rootGraph();
    const inner = node.graph && node.graph !== root ? node.graph.id : "";
    return [root?.id ?? "", inner, node.id].join("/");
}

/** The node of an execution id: "7", or "3:7" for node 7 inside the subgraph node 3. */
function nodeOf(id) {
    let graph = rootGraph();
    let node = null;
    for (const part of String(id).split(":")) {
        node = graph?.getNodeById(part) ?? graph?.getNodeById(Number(part)) ?? null;
        graph = node?.subgraph;
    }
    return node?.type === OURS ? node : null;
}

/** Everything that decides what a run does, as one string. */
function signatureOf(node, found) {
    const { [WIDGET]: _, "$$node-text-preview": __, ...options } = optionsOf(node);
    return JSON.stringify([options, node.mode, found.samplers.map(({ noise }) => noise), found.replacedBy]);
}

function refresh(node) {
    const timeline = shown.get(node);
    if (!timeline || !node.graph) return;
    const found = findSamplers(node);
    timeline.show(describe(node, found, resultOf(keyOf(node)), signatureOf(node, found)));
}

function refreshAll() {
    if (document.hidden) return;
    setLanguage(localeOf());
    for (const node of shown.keys()) refresh(node);
}

function themeAll() {
    for (const timeline of shown.values()) timeline.theme();
}

/** The language that the frontend is set to, which may change at any time. */
function localeOf() {
    return app.extensionManager?.setting?.get?.("Comfy.Locale") ?? navigator.language ?? "en";
}

/** Words that do not come are shown in English, so nothing here is worth a message. */
async function loadWords() {
    try {
        const answer = await api.fetchApi("/i18n");
        if (answer.ok) setTranslations(await answer.json());
    } catch {
        return;
    }
    refreshAll();
}

let started = false;

/** Looking begins with the first node of ours, so that a workflow without one costs nothing. */
function start() {
    if (started) return;
    started = true;
    const style = document.createElement("link");
    style.rel = "stylesheet";
    style.href = new URL("./vc_attention/timeline.css", import.meta.url).href;
    document.head.append(style);
    setLanguage(localeOf());
    loadWords();
    setInterval(refreshAll, PERIOD);
    const observer = new MutationObserver(themeAll);
    for (const target of [document.documentElement, document.body])
        observer.observe(target, { attributes: true, attributeFilter: ["class", "style"] });
}

/** The wheel and the middle button belong to the canvas, which lies under the element in the canvas renderer. */
function passOn(element) {
    element.addEventListener("wheel", (event) => {
        if (!globalThis.LiteGraph?.vueNodesMode) app.canvas.processMouseWheel(event);
    }, { passive: false });
    for (const [type, method] of [
        ["pointerdown", "processMouseDown"],
        ["pointermove", "processMouseMove"],
        ["pointerup", "processMouseUp"],
    ]) {
        element.addEventListener(type, (event) => {
            const middle = event.button === 1 || (event.buttons & 4) === 4;
            if (middle && !globalThis.LiteGraph?.vueNodesMode) app.canvas[method](event);
        });
    }
}

function addTimeline(node) {
    start();
    const timeline = new Timeline(HELP, () => node.setDirtyCanvas?.(true, true));
    const height = () => timeline.height + 2 * MARGIN;
    // Behind all widgets of the schema, and in neither workflow nor prompt: widgets_values stays what it was.
    const widget = node.addDOMWidget(WIDGET, WIDGET, timeline.element, {
        serialize: false,
        hideOnZoom: false,
        margin: MARGIN,
        getMinHeight: height,
        getMaxHeight: height,
        getValue: () => "",
        setValue: () => {},
    });
    widget.serialize = false;
    passOn(timeline.element);
    shown.set(node, timeline);
    const removed = node.onRemoved;
    node.onRemoved = function (...given) {
        shown.delete(node);
        timeline.remove();
        return removed?.apply(this, given);
    };
    for (const own of node.widgets) {
        if (own === widget) continue;
        const callback = own.callback;
        own.callback = function (...given) {
            const answer = callback?.apply(this, given);
            queueMicrotask(() => refresh(node));
            return answer;
        };
    }
    requestAnimationFrame(() => {
        timeline.theme();
        refresh(node);
    });
}

app.registerExtension({
    name: "vc_attention.timeline",
    setup() {
        api.addEventListener(EVENT, ({ detail }) => {
            const node = nodeOf(detail.node);
            if (!node) return;
            keep(keyOf(node), detail, signatureOf(node, findSamplers(node)));
            refresh(node);
        });
    },
    nodeCreated(node) {
        if (node.comfyClass === OURS && node.addDOMWidget) addTimeline(node);
    },
});
