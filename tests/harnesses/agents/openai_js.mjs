// /// script
// [tool.harness]
// npm = ["openai@7.59.0", "zod@4.6.7"]
// dialect = "chat"
// unknown = false
// ///
import OpenAI from 'openai'

const parameters = {
  type: 'object',
  properties: { where: { type: 'string' }, times: { type: 'integer', default: 1 } },
  required: ['where']
}
const look = ({ where, times = 1 }) => `${where}: nothing, ${times} times`
const tools = [{ type: 'function', function: { name: 'look', description: 'Look somewhere.', parameters, parse: JSON.parse, function: look } }]
const client = new OpenAI()
let messages = [{ role: 'system', content: 'You look.' }]
let answer
for (const question of process.argv.slice(2)) {
  messages.push({ role: 'user', content: question })
  const runner = client.chat.completions.runTools({ model: process.env.MODEL, messages, tools, stream: true })
  answer = await runner.finalContent()
  messages = [...runner.messages]
}
console.log(answer)
