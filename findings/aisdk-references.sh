#!/usr/bin/env bash
# Guess: in the second step of a tool loop the AI SDK's default OpenAI model sends the first step's items back, as it
# got them.
# Instead (ai 7.0.173, @ai-sdk/openai 4.0.118): it sends ids. Reasoning and text come back as `item_reference` only,
# without a word of their content; the call comes back in full but without its id, and with its arguments parsed and
# written again by JavaScript: spaces go, 1.0 is 1, and 12345678901234567890 is 12345678901234567000.
# Hurts: servers without a memory of items refuse the step or lose the reasoning; and the numbers that a model sampled
# come back as others, so a check for the same turn fails by text and by value.
# Here: references to what a session answered are resolved, and numbers beyond 2^53 compare as doubles.
set -euo pipefail
tmp=$(mktemp -d)
trap 'rm -rf "$tmp"' EXIT
npm install --silent --prefix "$tmp" ai@7.0.173 @ai-sdk/openai@4.0.118 >"$tmp/npm.log" 2>&1 || { cat "$tmp/npm.log"; exit 1; }
cat >"$tmp/run.mjs" <<'JS'
import http from 'node:http';
import { isDeepStrictEqual } from 'node:util';
import { createOpenAI } from '@ai-sdk/openai';
import { generateText, jsonSchema, stepCountIs, tool } from 'ai';

const text = (id, text) => ({ type: 'message', id, role: 'assistant', status: 'completed', content: [{ type: 'output_text', text, annotations: [] }] });
const steps = [
  [
    { type: 'reasoning', id: 'rs_1', summary: [], content: [{ type: 'reasoning_text', text: 'Hm.' }] },
    text('msg_1', 'I will look.'),
    { type: 'function_call', id: 'fc_1', call_id: 'call_1', name: 'look', status: 'completed', arguments: '{"n":  1.0, "id": 12345678901234567890}' },
  ],
  [text('msg_2', 'Done.')],
];
const usage = { input_tokens: 1, output_tokens: 1, total_tokens: 2, input_tokens_details: { cached_tokens: 0 }, output_tokens_details: { reasoning_tokens: 0 } };
const bodies = [];
const server = http.createServer(async (request, response) => {
  let body = '';
  for await (const part of request) body += part;
  bodies.push(JSON.parse(body));
  response.setHeader('content-type', 'application/json');
  response.end(JSON.stringify({ id: `resp_${bodies.length}`, object: 'response', created_at: 1, model: 'm', status: 'completed', output: steps[bodies.length - 1], usage }));
});
await new Promise((ready) => server.listen(0, '127.0.0.1', ready));
const inputSchema = jsonSchema({ type: 'object', properties: { n: { type: 'number' }, id: { type: 'integer' } } });
await generateText({
  model: createOpenAI({ baseURL: `http://127.0.0.1:${server.address().port}`, apiKey: 'none' })('m'),
  tools: { look: tool({ description: 'Look.', inputSchema, execute: async () => 'ok' }) },
  stopWhen: stepCountIs(3),
  prompt: 'hi',
});
server.close();
const seen = bodies[1].input.slice(1);
console.log('ai 7.0.173, @ai-sdk/openai 4.0.118; the input of step 2 behind the user\'s message:');
for (const item of seen) console.log(JSON.stringify(item));
const expected = [
  { type: 'item_reference', id: 'rs_1' },
  { type: 'item_reference', id: 'msg_1' },
  { type: 'function_call', call_id: 'call_1', name: 'look', arguments: '{"n":1,"id":12345678901234567000}' },
  { type: 'function_call_output', call_id: 'call_1', output: 'ok' },
];
if (!isDeepStrictEqual(seen, expected)) {
  console.error('changed');
  process.exitCode = 1;
}
JS
node "$tmp/run.mjs"
