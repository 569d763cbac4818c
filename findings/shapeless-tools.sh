#!/usr/bin/env bash
# Guess: a tool of an MCP server has the parameters of the schema that it was registered with, or registering it is an error.
# Instead (@modelcontextprotocol/sdk 1.32.2, zod 4.6.7): if that schema is a union, or an object with a transformation behind it, the
# tool is listed with no parameters at all. The server takes calls by the whole schema all the same: one with no arguments, as the
# list has it, is refused, and one with the right ones is carried out. An object, also with a check behind it, has its parameters.
# No error and no warning.
# Hurts: a model is offered such a tool without parameters, and has to guess them or is refused; constrained decoding by that list
# allows `{}` alone or anything, and the rollouts teach that the tool does not work.
# Here: the router sends tools as the client sent them. A look at the tools of the first request shows an empty `properties`.
set -euo pipefail
tmp=$(mktemp -d)
trap 'rm -rf "$tmp"' EXIT
cd "$tmp"
npm init -y > /dev/null
npm install --silent --no-audit --no-fund @modelcontextprotocol/sdk@1.32.2 zod@4.6.7
cat > run.mjs <<'JS'
import assert from "node:assert/strict";
import { Client } from "@modelcontextprotocol/sdk/client/index.js";
import { InMemoryTransport } from "@modelcontextprotocol/sdk/inMemory.js";
import { McpServer } from "@modelcontextprotocol/sdk/server/mcp.js";
import * as z from "zod";

const path = z.object({ path: z.string() });
const query = z.object({ query: z.string() });
const SCHEMAS = {
  object: path,
  checked: path.refine((one) => one.path !== ""),
  union: z.union([path, query]),
  discriminated: z.discriminatedUnion("kind", [path.extend({ kind: z.literal("path") }), query.extend({ kind: z.literal("query") })]),
  transformed: path.transform((one) => ({ path: one.path.toLowerCase() })),
};
const SEEN = {
  object: [["path"], "refused", "done"],
  checked: [["path"], "refused", "done"],
  union: [[], "refused", "done"],
  discriminated: [[], "refused", "done"],
  transformed: [[], "refused", "done"],
};
const server = new McpServer({ name: "tools", version: "1" });
for (const [name, inputSchema] of Object.entries(SCHEMAS)) {
  server.registerTool(name, { inputSchema }, async () => ({ content: [{ type: "text", text: "done" }] }));
}
const client = new Client({ name: "agent", version: "1" });
const [ours, theirs] = InMemoryTransport.createLinkedPair();
await Promise.all([server.connect(theirs), client.connect(ours)]);
const { tools } = await client.listTools();

async function call(name, args) {
  return (await client.callTool({ name, arguments: args })).isError ? "refused" : "done";
}

console.log("@modelcontextprotocol/sdk 1.32.2, zod 4.6.7");
const found = {};
for (const { name, inputSchema } of tools) {
  found[name] = [Object.keys(inputSchema.properties), await call(name, {}), await call(name, { kind: "path", path: "a.txt" })];
  console.log(`${name}: ${JSON.stringify(inputSchema)}, {} is ${found[name][1]}, a path is ${found[name][2]}`);
}
await client.close();
assert.deepEqual(found, SEEN, "changed");
JS
node run.mjs
