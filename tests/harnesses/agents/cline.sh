# /// script
# [tool.harness]
# npm = ["cline@3.0.65"]
# dialect = "chat"
# tool = "run_commands"
# first = {commands = ["echo there 2"]}
# second = {commands = ["echo here"]}
# resume = false
# ///
# It resumes only in a terminal.
cline auth --provider openai-compatible --apikey none --modelid "$MODEL" --baseurl "$OPENAI_BASE_URL" >/dev/null || exit
cline "$1" --provider openai-compatible --model "$MODEL"
