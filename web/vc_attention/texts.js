// Every word of the timeline.

import { DENSE, GROUP, PHASES, PLAIN, REUSE } from "./schedule.js";

export const NAMES = { [GROUP]: "group", [REUSE]: "reuse", [PLAIN]: "plain", [DENSE]: "16 bit" };

const SENTENCES = {
    [GROUP]: "tokens are grouped",
    [REUSE]: "earlier groups serve",
    [PLAIN]: "low-bit without groups",
    [DENSE]: "16-bit attention",
};

/** "1 step", "20 steps". */
export const steps = (count) => `${count} ${count === 1 ? "step" : "steps"}`;

/** What step `index` (from 0) does. state: "now" while it runs, else empty. */
export const stepText = (index, phase, state = "") =>
    `Step ${index + 1}: ${NAMES[phase]}, ${SENTENCES[phase]}${state === "now" ? " (running)" : ""}`;

/** How many steps of each phase: [[phase, count], ...], phases that do not occur left out. */
export function tally(phases) {
    return PHASES.map((phase) => [phase, phases.filter((entry) => entry === phase).length]).filter(([, n]) => n);
}

/** One sentence for a whole row, for those who do not see it. */
export function rowText(title, phases) {
    const parts = tally(phases).map(([phase, count]) => `${count} ${NAMES[phase]}`);
    return `${title}: ${steps(phases.length)}, ${parts.join(", ")}`;
}

export const LABEL = "VC-Attention, steps of the denoising";
export const EXPECTED = "expected";
export const RUNNING = "running";
export const RAN = "as it ran";
export const STOPPED = "stopped early";
export const CHANGED = "The settings changed after the last run.";
export const NO_SAMPLER = "Connect the model output to a sampler to see its steps here.";
export const UNKNOWN_STEPS = "The step count is known when it runs.";
export const IS_OFF = "precision is off: the model passes through unchanged.";
export const BYPASSED = "This node is bypassed, so every step runs in 16 bit.";
export const MUTED = "This node is muted, so nothing behind it runs.";
export const replaced = (title) => `"${title}" further on takes this node's place on the model.`;
export const declinedText = (count) => `${count} ${count === 1 ? "call" : "calls"} declined: `;
export const linkTitle = (words) => `What "${words}" means, and what to do (opens the help page)`;
