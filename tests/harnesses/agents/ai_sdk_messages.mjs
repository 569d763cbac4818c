// /// script
// [tool.harness]
// npm = ["ai@7.0.173", "@ai-sdk/anthropic@4.0.105", "zod@4.6.7"]
// dialect = "messages"
// ///
import { createAnthropic } from '@ai-sdk/anthropic'
import { stepCountIs, streamText, tool } from 'ai'
import { z } from 'zod'

const look = tool({
  description: 'Look somewhere.',
  inputSchema: z.object({ where: z.string(), times: z.number().default(1) }),
  execute: async ({ where, times }) => `${where}: nothing, ${times} times`
})
const model = createAnthropic({ baseURL: process.env.ANTHROPIC_BASE_URL + '/v1' })(process.env.MODEL)
const messages = []
let answer
for (const question of process.argv.slice(2)) {
  messages.push({ role: 'user', content: question })
  const result = streamText({ model, system: 'You look.', messages, tools: { look }, stopWhen: stepCountIs(20) })
  answer = await result.text
  messages.push(...(await result.responseMessages))
}
console.log(answer)
