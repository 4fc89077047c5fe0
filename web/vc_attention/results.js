// What the server said of the last run of each node. The frontend makes its nodes anew on undo and on changing tabs,
// so this is kept by the workflow's and the node's id, not by the node.

import { DENSE, GROUP, PLAIN, REUSE } from "./schedule.js";

const LETTERS = { g: GROUP, r: REUSE, p: PLAIN, d: DENSE };
const MOST = 200;
const kept = new Map();

/**
 * Take a message of the server in: { node, prompt, run, state, steps, step, plan, ran, ... } (nodes/live.py).
 *
 * key: of the node. signature: of its settings, as they are when the first message of a prompt comes.
 */
export function keep(key, message, signature) {
    let entry = kept.get(key);
    if (!entry || entry.prompt !== message.prompt) entry = { prompt: message.prompt, signature, runs: new Map() };
    if (message.state === "ready") entry.ready = message;
    else entry.runs.set(message.run, message);
    kept.delete(key);
    kept.set(key, entry);
    while (kept.size > MOST) kept.delete(kept.keys().next().value);
}

/** { signature, ready, runs: Map of run number to message } of the last prompt, or undefined. */
export const resultOf = (key) => kept.get(key);

/**
 * The cells of one run: [{ phase, state }], state "ran", "now" or "planned".
 *
 * `plan` and `ran` have one letter a step; a dot in `ran` is a step that has not been seen.
 */
export function cellsOf(message) {
    return Array.from({ length: message.steps }, (_, i) => {
        const ran = LETTERS[message.ran[i]];
        if (message.state === "running" && i === message.step)
            return { phase: LETTERS[message.plan[i]] ?? PLAIN, state: "now" };
        return ran ? { phase: ran, state: "ran" } : { phase: LETTERS[message.plan[i]] ?? PLAIN, state: "planned" };
    });
}
