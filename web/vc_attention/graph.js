// The samplers that run the model of a node, and how many steps each has. The graph is only read: no foreign node is
// touched. What is used of it: nodes with inputs, outputs, widgets, mode and, for subgraphs, subgraph.

import { noiseLevels } from "./schedule.js";

export const OURS = "VCAttentionPatch";

const MUTED = 2;
const BYPASSED = 4;
/** Ends of links at the border of a subgraph: numbers, and strings in newer frontends. */
const SUBGRAPH_INPUT = -10;
const SUBGRAPH_OUTPUT = -20;
/** More samplers than this behind one node are not looked for. */
const MOST = 4;

/**
 * The samplers behind the MODEL output of `node`, in no particular order.
 *
 * Returns { samplers, replacedBy }: samplers is an array of { title, noise } with `noise` as `expected` of schedule.js
 * takes it, or null where the step count is not known before the run; replacedBy is the title of a further
 * VC-Attention Patch, which takes this node's place, or null.
 */
export function findSamplers(node) {
    const found = { samplers: [], replacedBy: null };
    const walk = { found, seen: new Set() };
    for (const parents of contexts(node.graph)) {
        node.outputs?.forEach((output, slot) => {
            if (output.type === "MODEL") leave(walk, node, slot, "MODEL", parents);
        });
    }
    return found;
}

/** The chains of subgraph nodes that lead to `graph`, innermost last; one empty chain for the root graph. */
function contexts(graph) {
    const root = graph?.rootGraph ?? graph;
    if (!graph || graph === root) return [[]];
    const chains = [];
    const search = (current, parents) => {
        for (const node of current?._nodes ?? []) {
            const inner = node.subgraph;
            if (!inner || parents.includes(node) || chains.length >= MOST) continue;
            if (inner === graph) chains.push([...parents, node]);
            else search(inner, [...parents, node]);
        }
    };
    search(root, []);
    return chains;
}

function linkOf(graph, id) {
    if (id === null || id === undefined) return null;
    return graph?.getLink?.(id) ?? graph?.links?.get?.(id) ?? graph?.links?.[id] ?? null;
}

/** Go on from an output, along all of its links. */
function leave(walk, node, slot, type, parents) {
    const key = [...parents.map((parent) => parent.id), node.id, slot].join("/");
    if (walk.seen.has(key)) return;
    walk.seen.add(key);
    for (const id of node.outputs?.[slot]?.links ?? []) arrive(walk, node.graph, linkOf(node.graph, id), type, parents);
}

function arrive(walk, graph, link, type, parents) {
    if (!link || walk.found.samplers.length >= MOST) return;
    if (Number(link.target_id) === SUBGRAPH_OUTPUT) {
        const parent = parents.at(-1);
        if (parent) leave(walk, parent, link.target_slot, type, parents.slice(0, -1));
        return;
    }
    const node = graph.getNodeById(link.target_id);
    if (!node || node.mode === MUTED) return;
    const outputs = node.outputs ?? [];
    if (node.mode === BYPASSED) {
        outputs.forEach((output, slot) => {
            if (output.type === type && bypassSource(node, slot, type) === link.target_slot)
                leave(walk, node, slot, type, parents);
        });
    } else if (node.subgraph) {
        for (const id of node.subgraph.inputs?.[link.target_slot]?.linkIds ?? [])
            arrive(walk, node.subgraph, linkOf(node.subgraph, id), type, [...parents, node]);
    } else if (node.type === "Reroute") {
        leave(walk, node, 0, type, parents);
    } else if (node.type === OURS) {
        walk.found.replacedBy = node.title || node.type;
    } else {
        const onward = outputs.flatMap((output, slot) => (["MODEL", "GUIDER"].includes(output.type) ? [slot] : []));
        for (const slot of onward) leave(walk, node, slot, outputs[slot].type, parents);
        if (!onward.length) addSampler(walk, node, parents);
    }
}

/** The input that a bypassed node hands on at output `slot`. */
function bypassSource(node, slot, type) {
    return node.inputs?.[slot]?.type === type ? slot : (node.inputs ?? []).findIndex((input) => input.type === type);
}

function addSampler(walk, node, parents) {
    const sigmas = node.inputs?.find((input) => input.type === "SIGMAS");
    if (sigmas) {
        walk.found.samplers.push({ title: node.title || node.type, noise: noiseOf(node.graph, sigmas.link, parents) });
    } else if (hasWidget(node, "steps") && !node.outputs?.some((output) => output.type === "SIGMAS")) {
        walk.found.samplers.push({ title: node.title || node.type, noise: samplerNoise(node, parents) });
    }
}

function samplerNoise(node, parents) {
    const steps = number(node, "steps", parents);
    if (steps === null) return null;
    const options = {};
    for (const [key, widget] of [["denoise", "denoise"], ["start", "start_at_step"], ["end", "end_at_step"]]) {
        if (!hasWidget(node, widget)) continue;
        const value = number(node, widget, parents);
        if (value === null) return null;
        options[key] = value;
    }
    options.full = node.widgets.find((w) => w.name === "return_with_leftover_noise")?.value === "disable";
    return noiseLevels(steps, options);
}

/** The noise levels that come over a SIGMAS link, as shares, or null where they are not known before the run. */
function noiseOf(graph, id, parents, depth = 0) {
    const link = linkOf(graph, id);
    if (!link || depth > 50) return null;
    if (Number(link.origin_id) === SUBGRAPH_INPUT) {
        const parent = parents.at(-1);
        return parent
            ? noiseOf(parent.graph, parent.inputs?.[link.origin_slot]?.link, parents.slice(0, -1), depth + 1)
            : null;
    }
    const node = graph.getNodeById(link.origin_id);
    if (!node || node.mode === MUTED) return null;
    const before = () => {
        const input = node.inputs?.find((entry) => entry.type === "SIGMAS" || node.type === "Reroute");
        return input ? noiseOf(graph, input.link, parents, depth + 1) : null;
    };
    if (node.type === "Reroute" || node.mode === BYPASSED) return before();
    if (node.subgraph) {
        const inner = node.subgraph.outputs?.[link.origin_slot]?.linkIds?.[0];
        return noiseOf(node.subgraph, inner, [...parents, node], depth + 1);
    }
    if (node.type === "SplitSigmas") {
        const [noise, step] = [before(), number(node, "step", parents)];
        if (noise === null || step === null) return null;
        return link.origin_slot === 0 ? noise.slice(0, step + 1) : noise.slice(step);
    }
    if (node.type === "FlipSigmas") return before()?.reverse() ?? null;
    const steps = hasWidget(node, "steps") ? number(node, "steps", parents) : null;
    if (steps === null || node.inputs?.some((input) => input.type === "SIGMAS")) return null;
    const denoise = hasWidget(node, "denoise") ? number(node, "denoise", parents) : 1;
    return denoise === null ? null : noiseLevels(steps, { denoise });
}

function hasWidget(node, name) {
    return Boolean(node.widgets?.some((widget) => widget.name === name));
}

/** The value of a number widget, also where a link feeds it; null where it is not a number before the run. */
function number(node, name, parents) {
    const input = node.inputs?.find((entry) => (entry.widget?.name ?? entry.name) === name);
    const value =
        input && input.link !== null && input.link !== undefined
            ? linkedValue(node.graph, input.link, parents)
            : node.widgets?.find((widget) => widget.name === name)?.value;
    return typeof value === "number" && Number.isFinite(value) ? value : null;
}

function linkedValue(graph, id, parents, depth = 0) {
    const link = linkOf(graph, id);
    if (!link || depth > 50) return null;
    if (Number(link.origin_id) === SUBGRAPH_INPUT) {
        const parent = parents.at(-1);
        const input = parent?.inputs?.[link.origin_slot];
        if (!input) return null;
        if (input.link !== null && input.link !== undefined)
            return linkedValue(parent.graph, input.link, parents.slice(0, -1), depth + 1);
        return parent.widgets?.find((widget) => widget.name === (input.widget?.name ?? input.name))?.value ?? null;
    }
    const node = graph.getNodeById(link.origin_id);
    if (!node || node.mode === MUTED || node.mode === BYPASSED) return null;
    if (node.type === "Reroute") return linkedValue(graph, node.inputs?.[0]?.link, parents, depth + 1);
    if (node.type === "PrimitiveNode") return node.widgets?.[0]?.value ?? null;
    const input = node.inputs?.find((entry) => (entry.widget?.name ?? entry.name) === "value");
    if (input?.link !== null && input?.link !== undefined) return null;
    return node.widgets?.find((widget) => widget.name === "value")?.value ?? null;
}
