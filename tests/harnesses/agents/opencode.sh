# /// script
# [tool.harness]
# npm = ["opencode-ai@1.18.33"]
# dialect = "chat"
# trajectories = 2
# because = "the call of an unknown tool comes back as a call of `invalid`: [unknown-tools](../findings/unknown-tools.sh)"
# tool = "bash"
# first = {command = "echo there 2", description = "Looks"}
# second = {command = "echo here", description = "Looks"}
# ///
cat >opencode.json <<END
{"provider": {"router": {"npm": "@ai-sdk/openai-compatible", "options": {"baseURL": "$OPENAI_BASE_URL", "apiKey": "none"},
 "models": {"$MODEL": {"limit": {"context": 30000, "output": 2000}}}}}, "autoupdate": false, "share": "disabled"}
END
more=
for question in "$@"; do
  answer=$(opencode run "$question" $more --model "router/$MODEL") || exit
  more=--continue
done
echo "$answer"
