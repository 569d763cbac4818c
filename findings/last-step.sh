#!/usr/bin/env bash
# Guess: `messages.push(...result.response.messages)`, by which the documentation of ai 5 and 6 keeps a conversation, keeps
# all of a tool loop in ai 7 as well, since it type-checks and warns of nothing.
# Instead (ai 7.0.173): `response` is that of the last step, so only the final answer is kept. The call and the result that
# it is about are gone from the next request. ai 6.0.326 kept them; in 7 `result.responseMessages` has them.
# Hurts: an agent that was moved from 6 to 7 asks its second question without what its tools found. A trainer gets a second
# trajectory, in which the model says what it never looked up.
# Here: the reply to the next question says `edited_turn`, and the turns of the loop stay in a trajectory of their own.
set -euo pipefail
tmp=$(mktemp -d)
trap 'rm -rf "$tmp"' EXIT
install() { # the folder and packages
  mkdir "$tmp/$1"
  npm install --silent --prefix "$tmp/$1" "${@:2}" >"$tmp/npm.log" 2>&1 || { cat "$tmp/npm.log"; exit 1; }
  cp "$tmp/run.mjs" "$tmp/$1/"
}
cat >"$tmp/run.mjs" <<'JS'
import http from 'node:http';
import { createOpenAICompatible } from '@ai-sdk/openai-compatible';
import { generateText, jsonSchema, stepCountIs, tool } from 'ai';

const call = { id: 'call_1', type: 'function', function: { name: 'look', arguments: '{}' } };
const replies = [{ content: null, tool_calls: [call] }, { content: 'Under the bed.' }, { content: 'Yes.' }];
const bodies = [];
const server = http.createServer(async (request, response) => {
  let body = '';
  for await (const part of request) body += part;
  const message = { role: 'assistant', ...replies[bodies.length] };
  bodies.push(JSON.parse(body));
  const choices = [{ index: 0, message, finish_reason: message.tool_calls ? 'tool_calls' : 'stop' }];
  response.setHeader('content-type', 'application/json');
  response.end(JSON.stringify({ id: 'x', object: 'chat.completion', created: 1, model: 'm', choices }));
});
await new Promise((ready) => server.listen(0, '127.0.0.1', ready));
const baseURL = `http://127.0.0.1:${server.address().port}`;
const model = createOpenAICompatible({ name: 'here', baseURL, apiKey: 'none' })('m');
const look = tool({ description: 'Look.', inputSchema: jsonSchema({ type: 'object', properties: {} }), execute: async () => 'a shoe' });
const messages = [];
for (const content of ['What is under the bed?', 'Are you sure?']) {
  messages.push({ role: 'user', content });
  const result = await generateText({ model, messages, tools: { look }, stopWhen: stepCountIs(5) });
  messages.push(...result.response.messages);
}
server.close();
console.log(bodies.at(-1).messages.map((one) => one.role).join(' '));
JS
install 6 ai@6.0.326 @ai-sdk/openai-compatible@2.0.92
install 7 ai@7.0.173 @ai-sdk/openai-compatible@3.0.92
before=$(node "$tmp/6/run.mjs") after=$(node "$tmp/7/run.mjs")
echo "whose messages the request with the second question has, behind a question, a call, its result and an answer:"
echo "ai 6.0.326: $before"
echo "ai 7.0.173: $after"
[ "$before" = "user assistant tool assistant user" ] && [ "$after" = "user assistant user" ] || { echo changed >&2; exit 1; }
