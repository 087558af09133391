import java.io.IOException;
import java.net.URI;
import java.net.http.HttpClient;
import java.net.http.HttpRequest;
import java.net.http.HttpRequest.BodyPublishers;
import java.net.http.HttpResponse;
import java.net.http.HttpResponse.BodyHandlers;
import java.util.concurrent.Callable;
import java.util.regex.Pattern;

/** Java's own HTTP client, which Spring uses as well: each request offers an upgrade to HTTP/2 (h2c). */
class UseJava {
    static final String URL = System.getenv("LORAPLEX_URL"), MODEL = System.getenv("LORAPLEX_MODEL");
    static final HttpClient CLIENT = HttpClient.newHttpClient();
    static final String QUESTION = "{\"role\":\"user\",\"content\":\"What is the weather?\"}";
    static final String SCHEMA = "{\"type\":\"object\",\"properties\":{\"city\":{\"type\":\"string\",\"enum\":[\"Oslo\",\"Paris\"]},"
            + "\"days\":{\"type\":\"integer\",\"enum\":[1,2,3]}},\"required\":[\"city\",\"days\"],\"additionalProperties\":false}";
    static final Pattern CONTENT = Pattern.compile("\"content\":\"((?:[^\"\\\\]|\\\\.)*)\"");

    public static void main(String[] arguments) {
        run("stream", UseJava::stream);
        run("tools", UseJava::tools);
        run("schema", UseJava::schema);
        run("overflow", UseJava::overflow);
    }

    /** Join a stream's chunks to the whole answer. */
    static Void stream() throws Exception {
        String fields = "\"max_tokens\":20,\"messages\":[" + QUESTION + "]";
        String whole = content(chat(fields, 200));
        StringBuilder parts = new StringBuilder();
        chat(fields + ",\"stream\":true", 200).lines().filter(line -> line.startsWith("data: {")).forEach(line -> parts.append(content(line)));
        check(!whole.isEmpty() && parts.toString().equals(whole), parts + " is not " + whole);
        return null;
    }

    /** Send the model's call back with the result. */
    static Void tools() throws Exception {
        String tools = "\"tools\":[{\"type\":\"function\",\"function\":{\"name\":\"weather\",\"parameters\":" + SCHEMA + "}}]";
        String choice = ",\"tool_choice\":{\"type\":\"function\",\"function\":{\"name\":\"weather\"}}";
        String called = chat(tools + choice + ",\"messages\":[" + QUESTION + "]", 200);
        check(called.contains("\"finish_reason\":\"tool_calls\""), called);
        String message = object(called, called.indexOf("\"message\":") + "\"message\":".length());
        String id = find("\"id\":\"([^\"]*)\"", message);
        String result = "{\"role\":\"tool\",\"tool_call_id\":\"" + id + "\",\"content\":\"rain\"}";
        String answer = chat(tools + ",\"tool_choice\":\"none\",\"max_tokens\":20,\"messages\":[" + String.join(",", QUESTION, message, result) + "]", 200);
        check(!content(answer).isEmpty(), answer);
        return null;
    }

    /** Get an answer that is JSON of a schema. */
    static Void schema() throws Exception {
        String format = "\"response_format\":{\"type\":\"json_schema\",\"json_schema\":{\"name\":\"weather\",\"schema\":" + SCHEMA + "}}";
        String answer = content(chat(format + ",\"messages\":[" + QUESTION + "]", 200)).replace("\\", "");
        check(answer.matches("\\s*\\{\\s*\"city\"\\s*:\\s*\"(Oslo|Paris)\"\\s*,\\s*\"days\"\\s*:\\s*[123]\\s*\\}\\s*"), answer);
        return null;
    }

    /** Get the error for a prompt that is too long. */
    static Void overflow() throws Exception {
        String refusal = chat("\"messages\":[{\"role\":\"user\",\"content\":\"" + "word ".repeat(10_000) + "\"}]", 400);
        check(refusal.contains("maximum context length"), refusal);
        return null;
    }

    static String chat(String fields, int status) throws IOException, InterruptedException {
        String body = "{\"model\":\"" + MODEL + "\",\"temperature\":0," + fields + "}";
        HttpRequest request = HttpRequest.newBuilder(URI.create(URL + "/v1/chat/completions"))
                .header("Content-Type", "application/json").POST(BodyPublishers.ofString(body)).build();
        HttpResponse<String> response = CLIENT.send(request, BodyHandlers.ofString());
        check(response.statusCode() == status, response.statusCode() + ": " + response.body());
        return response.body();
    }

    static String content(String json) {
        var matcher = CONTENT.matcher(json);
        return matcher.find() ? matcher.group(1) : "";
    }

    static String find(String pattern, String text) {
        var matcher = Pattern.compile(pattern).matcher(text);
        check(matcher.find(), text);
        return matcher.group(1);
    }

    /** Return the JSON object that begins at a place; braces within its texts are balanced here. */
    static String object(String json, int from) {
        int depth = 0, at = from;
        do {
            char character = json.charAt(at++);
            depth += character == '{' ? 1 : character == '}' ? -1 : 0;
        } while (depth > 0);
        return json.substring(from, at);
    }

    static void check(boolean holds, String why) {
        if (!holds) throw new AssertionError(why);
    }

    static void run(String scenario, Callable<Void> callable) {
        String why = "";
        try {
            callable.call();
        } catch (Exception | AssertionError error) {
            error.printStackTrace();
            why = String.valueOf(error).replaceAll("[^ -~]|[\"\\\\]", " ");
        }
        System.out.println("{\"scenario\": \"" + scenario + "\", \"ok\": " + why.isEmpty() + ", \"why\": \"" + why + "\"}");
    }
}
