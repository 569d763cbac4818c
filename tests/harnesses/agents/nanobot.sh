# /// script
# dependencies = ["nanobot-ai==0.3.5"]
# [tool.harness]
# dialect = "chat"
# match = "calls"
# trajectories = 2
# because = "it strips the last answer, and the template writes its white space"
# tool = "exec"
# first = {command = "echo there 2", timeout = 9}
# second = {command = "echo here"}
# ///
mkdir -p ~/.nanobot
cat >~/.nanobot/config.json <<END
{"providers": {"custom": {"apiKey": "none", "apiBase": "$OPENAI_BASE_URL"}},
 "agents": {"defaults": {"model": "$MODEL", "provider": "custom", "maxTokens": 4000}}}
END
for question in "$@"; do
  answer=$(nanobot agent --classic --no-markdown --session one --message "$question") || exit
done
echo "$answer"
