// /// script
// [tool.harness]
// npm = ["langchain@1.5.14", "@langchain/core", "@langchain/openai@1.6.0", "zod@4.6.7"]
// dialect = "chat"
// ///
import { ChatOpenAI } from '@langchain/openai'
import { createAgent, tool } from 'langchain'
import { z } from 'zod'

const look = tool(async ({ where, times }) => `${where}: nothing, ${times} times`, {
  name: 'look',
  description: 'Look somewhere.',
  schema: z.object({ where: z.string(), times: z.number().default(1) })
})
const model = new ChatOpenAI({ model: process.env.MODEL, configuration: { baseURL: process.env.OPENAI_BASE_URL } })
const agent = createAgent({ model, tools: [look], systemPrompt: 'You look.' })
let messages = []
for (const question of process.argv.slice(2)) {
  ;({ messages } = await agent.invoke({ messages: [...messages, { role: 'user', content: question }] }))
}
console.log(messages.at(-1).text)
