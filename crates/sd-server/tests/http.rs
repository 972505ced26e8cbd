//! The built server, over a socket, with the demo model.
#![allow(clippy::expect_used, clippy::panic, clippy::unwrap_used)]

use std::io::{BufRead, BufReader, Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::process::{Child, ChildStderr, Command, Stdio};
use std::time::{Duration, Instant};

use base64::Engine as _;
use serde_json::{Value, json};

const DEADLINE: Duration = Duration::from_secs(60);

struct Server {
    child: Child,
    log: BufReader<ChildStderr>,
    address: SocketAddr,
}

impl Server {
    fn start(extra: &[&str]) -> Server {
        let mut child = Command::new(env!("CARGO_BIN_EXE_sd-server"))
            .args(["--listen-port", "0", "--threads", "1", "--backend", "cpu"])
            .args(extra)
            .stderr(Stdio::piped())
            .spawn()
            .unwrap();
        let mut log = BufReader::new(child.stderr.take().unwrap());
        let mut line = String::new();
        while !line.contains("listening on") {
            line.clear();
            assert!(log.read_line(&mut line).unwrap() > 0, "it ended before it listened");
        }
        let (_, address) = line.trim().split_once("http://").unwrap();
        let address = address.parse().unwrap();
        Server { child, log, address }
    }

    /// Head and body of one answer.
    fn raw(&self, method: &str, path: &str, body: &[u8]) -> (String, String) {
        let mut stream = TcpStream::connect(self.address).unwrap();
        stream.set_read_timeout(Some(DEADLINE)).unwrap();
        let head = format!("{method} {path} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n");
        write!(stream, "{head}Content-Length: {}\r\n\r\n", body.len()).unwrap();
        // A server that refuses a body need not read it.
        let _ = stream.write_all(body);
        let mut answer = String::new();
        let _ = stream.read_to_string(&mut answer);
        let (head, body) = answer.split_once("\r\n\r\n").unwrap_or_else(|| panic!("{method} {path}: {answer}"));
        (head.to_owned(), body.to_owned())
    }

    /// Status and JSON of one answer; null where there is none.
    fn ask(&self, method: &str, path: &str, body: &[u8]) -> (u16, Value) {
        let (head, body) = self.raw(method, path, body);
        let status = head.split(' ').nth(1).unwrap().parse().unwrap();
        (status, serde_json::from_str(&body).unwrap_or_default())
    }

    fn get(&self, path: &str) -> Value {
        let (status, body) = self.ask("GET", path, b"");
        assert_eq!(status, 200, "{path}: {body}");
        body
    }

    fn post(&self, path: &str, body: &Value) -> (u16, Value) {
        self.ask("POST", path, body.to_string().as_bytes())
    }

    fn signal(&self, name: &str) {
        let kill = Command::new("sh").arg("-c").arg(format!("kill -{name} {}", self.child.id())).status().unwrap();
        assert!(kill.success());
    }

    /// What is logged until it ends, in good order.
    fn rest(&mut self) -> String {
        let mut rest = String::new();
        self.log.read_to_string(&mut rest).unwrap();
        assert!(self.child.wait().unwrap().success(), "{rest}");
        rest
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        // Already gone when the test ended it.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

fn decoded(text: &Value) -> Vec<u8> {
    base64::prelude::BASE64_STANDARD.decode(text.as_str().unwrap()).unwrap()
}

/// Width and height of a PNG file, which IHDR holds.
fn png_size(bytes: &[u8]) -> (u32, u32) {
    assert_eq!(bytes[..8], *b"\x89PNG\r\n\x1a\n");
    let side = |at: usize| u32::from_be_bytes(bytes[at..at + 4].try_into().unwrap());
    (side(16), side(20))
}

#[test]
fn paths_lists_and_the_page() {
    let server = Server::start(&["--steps", "7", "-W", "100"]);
    assert_eq!(server.address.ip().to_string(), "127.0.0.1");
    assert_eq!(server.get("/health"), json!({"status": "ok"}));
    for (method, path) in [("GET", "/nothing"), ("POST", "/health"), ("GET", "/sdapi/v1/txt2img")] {
        assert_eq!(server.ask(method, path, b""), (404, json!({"error": "not found"})), "{method} {path}");
    }
    assert_eq!(server.get("/v1/models")["data"][0]["id"], "demo");
    assert_eq!(server.get("/sdapi/v1/sd-models")[0]["model_name"], "demo");
    assert_eq!(server.get("/sdapi/v1/options")["sd_model_checkpoint"], "demo");
    let names = |path: &str| -> Vec<String> {
        let list = server.get(path);
        list.as_array().unwrap().iter().map(|item| item["name"].as_str().unwrap().to_owned()).collect()
    };
    assert!(names("/sdapi/v1/samplers").contains(&"Euler a".to_owned()));
    assert!(names("/sdapi/v1/schedulers").starts_with(&["automatic".to_owned()]));
    assert_eq!(server.post("/sdapi/v1/options", &json!({"sd_model_checkpoint": "demo.safetensors"})).0, 200);
    assert_eq!(server.post("/sdapi/v1/options", &json!({"sd_model_checkpoint": "other"})).0, 400);
    assert_eq!(server.post("/sdapi/v1/options", &json!({"odd": 1})).0, 400);
    let about = server.get("/sdcpp/v1/capabilities");
    let defaults = &about["defaults"];
    assert_eq!((&defaults["width"], &defaults["sample_params"]["sample_steps"]), (&json!(104), &json!(7)));
    assert_eq!(server.get("/sdapi/v1/progress")["progress"], 0.0);

    let (head, page) = server.raw("GET", "/", b"");
    assert!(head.contains("text/html") && head.contains("default-src 'none'"), "{head}");
    assert!(page.contains("<title>sd-rs</title>") && !page.contains("://"));
    let (head, body) = server.raw("OPTIONS", "/v1/images/generations", b"");
    assert!(head.starts_with("HTTP/1.1 204") && body.is_empty(), "{head}");
    assert!(head.to_lowercase().contains("access-control-allow-origin: *"), "{head}");
}

#[test]
fn pictures() {
    let server = Server::start(&[]);
    let ask = json!({"prompt": "a red circle", "negative_prompt": "blue", "width": 64, "height": 128, "steps": 3,
        "seed": 7, "batch_size": 2, "sampler_name": "Euler a", "odd": 1});
    let (status, answer) = server.post("/sdapi/v1/txt2img", &ask);
    assert_eq!(status, 200, "{answer}");
    assert_eq!(answer["parameters"], ask);
    assert_eq!(answer["warnings"], json!(["odd: unknown, ignored"]));
    let info: Value = serde_json::from_str(answer["info"].as_str().unwrap()).unwrap();
    assert_eq!((&info["all_seeds"], &info["sampler_name"]), (&json!([7, 8]), &json!("Euler a")));
    let images: Vec<Vec<u8>> = answer["images"].as_array().unwrap().iter().map(decoded).collect();
    assert_eq!(images.len(), 2);
    assert!(images.iter().all(|image| png_size(image) == (64, 128)));
    let text = b"tEXtparameters\0a red circle\nNegative prompt: blue\nSteps: 3, ";
    assert!(images[0].windows(text.len()).any(|w| w == text));

    let ask = json!({"prompt": "a red circle", "negative_prompt": "blue", "size": "64x128", "steps": 3, "seed": 8});
    let (status, answer) = server.post("/v1/images/generations", &ask);
    assert_eq!((status, &answer["size"], &answer["output_format"]), (200, &json!("64x128"), &json!("png")));
    assert_eq!(decoded(&answer["data"][0]["b64_json"]), images[1], "the second of the seeds 7 and 8");

    let ask = json!({"prompt": "a", "size": "64x64", "steps": 1, "n": 2, "output_format": "jpeg",
        "response_format": "url"});
    let (status, answer) = server.post("/v1/images/generations", &ask);
    let data = answer["data"].as_array().unwrap();
    assert_eq!((status, data.len()), (200, 2));
    let url = data[0]["url"].as_str().unwrap().strip_prefix("data:image/jpeg;base64,").unwrap();
    assert!(decoded(&json!(url)).starts_with(&[0xff, 0xd8, 0xff]));
    assert_ne!(data[0]["seed"], json!(42), "seeds are drawn");

    let ask = json!({"prompt": "a", "size": "64x64", "steps": 1, "output_format": "webp"});
    let file = decoded(&server.post("/v1/images/generations", &ask).1["data"][0]["b64_json"]);
    assert_eq!((&file[..4], &file[8..12]), (&b"RIFF"[..], &b"WEBP"[..]));
}

#[test]
fn loras() {
    let folder = std::path::Path::new(env!("CARGO_TARGET_TMPDIR")).join("server-loras");
    if folder.exists() {
        std::fs::remove_dir_all(&folder).unwrap();
    }
    std::fs::create_dir_all(folder.join("styles")).unwrap();
    let header = br#"{"diffusion_model.out.2.diff_b":{"dtype":"F32","shape":[4],"data_offsets":[0,16]}}"#;
    let bytes = [&(header.len() as u64).to_le_bytes(), &header[..], &0.5f32.to_le_bytes().repeat(4)].concat();
    std::fs::write(folder.join("styles/pale.safetensors"), bytes).unwrap();
    std::fs::create_dir_all(folder.join("ink")).unwrap();
    std::fs::copy(folder.join("styles/pale.safetensors"), folder.join("ink/adapter_model.safetensors")).unwrap();
    std::fs::write(folder.join("ink/adapter_config.json"), "{}").unwrap();
    let server = Server::start(&["--lora-model-dir", folder.to_str().unwrap()]);
    let peft = json!({"name": "ink", "alias": "ink", "path": "ink/adapter_model.safetensors", "metadata": {}});
    let listed = json!([peft, {"name": "styles/pale", "alias": "styles/pale", "path": "styles/pale.safetensors", "metadata": {}}]);
    assert_eq!(server.get("/sdapi/v1/loras"), listed);
    assert_eq!(server.get("/sdcpp/v1/capabilities")["loras"], listed);
    let draw = |prompt: &str, lora: Value| {
        let ask = json!({"prompt": prompt, "width": 64, "height": 64, "steps": 2, "seed": 7, "lora": lora});
        let (status, answer) = server.post("/sdapi/v1/txt2img", &ask);
        assert_eq!((status, &answer["warnings"]), (200, &json!([])), "{answer}");
        sd_io::Image::decode(&decoded(&answer["images"][0])).unwrap().rgb().to_vec()
    };
    let without = draw("a circle", json!(null));
    let with = draw("a circle", json!([{"path": "styles/pale.safetensors", "multiplier": 0.5}]));
    assert!(with == draw("a circle<lora:styles/pale:0.5>", json!([])) && with != without);
    assert!(with == draw("a circle<lora:ink:0.5>", json!([])));
    assert!(with == draw("a circle<lora:pale:0.5>", json!([])));
    assert!(with == draw("<lora:styles/pale.safetensors:0.25>a circle<lora:styles/pale:0.25>", json!([])));
    assert!(without == draw("a circle<lora:styles/pale:0.5><lora:styles/pale:-0.5>", json!([])));
    assert!(without == draw("a circle", json!([])), "something stayed");
    let outside = json!([{"path": "../server-loras/styles/pale.safetensors"}]);
    for path in ["/sdapi/v1/txt2img", "/sdcpp/v1/img_gen"] {
        let (status, answer) = server.post(path, &json!({"prompt": "a", "lora": outside}));
        assert_eq!(status, 400, "{answer}");
        assert!(answer["error"].as_str().unwrap().contains("is outside of"), "{answer}");
    }
    // The prompt of a job is read when its turn comes.
    let tag = json!({"prompt": "a<lora:../server-loras/styles/pale:1>"});
    let at = server.post("/sdcpp/v1/img_gen", &tag).1["poll_url"].as_str().unwrap().to_owned();
    let mut told = server.post("/sdapi/v1/txt2img", &tag);
    assert!(told.0 == 400 && told.1["error"].as_str().unwrap().contains("is outside of"), "{}", told.1);
    told.1 = server.get(&at);
    assert!(told.1["status"] == "failed" && told.1.to_string().contains("is outside of"), "{}", told.1);
    let ask = json!({"prompt": "a<lora:heron:1>", "size": "64x64", "steps": 1});
    let (status, answer) = server.post("/v1/images/generations", &ask);
    assert_eq!(status, 400, "{answer}");
    assert!(answer["error"].as_str().unwrap().starts_with("LoRA heron: not found"), "{answer}");
    // A file that is none is the request's fault; where the folder is concerns nobody.
    std::fs::write(folder.join("broken.safetensors"), b"\xff\x00\x00\x00\x00\x00\x00\x00{").unwrap();
    for (name, want) in
        [("broken", "LoRA broken: broken.safetensors: "), ("heron", "not found in the folder of LoRAs")]
    {
        let ask = json!({"prompt": format!("a<lora:{name}:1>"), "size": "64x64", "steps": 1});
        let (status, answer) = server.post("/v1/images/generations", &ask);
        let told = answer["error"].as_str().unwrap();
        assert_eq!(status, 400, "{told}");
        assert!(told.contains(want) && !told.contains(folder.to_str().unwrap()), "{told}");
    }
}

#[test]
fn control_nets_of_a_folder() {
    let folder = std::path::Path::new(env!("CARGO_TARGET_TMPDIR")).join("server-controls");
    if folder.exists() {
        std::fs::remove_dir_all(&folder).unwrap();
    }
    std::fs::create_dir_all(folder.join("sd15")).unwrap();
    let edges = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("../../assets/demo-edges.safetensors");
    std::fs::copy(&edges, folder.join("sd15/edges.safetensors")).unwrap();
    std::fs::write(folder.join("broken.pth"), b"broken").unwrap();
    let server = Server::start(&["--control-net-dir", folder.to_str().unwrap()]);
    let names = json!(["broken", "sd15/edges"]);
    assert_eq!(server.get("/controlnet/model_list"), json!({"model_list": names}));
    assert_eq!(server.get("/controlnet/module_list")["module_list"], json!(["none", "canny"]));
    assert_eq!(server.get("/sdcpp/v1/capabilities")["control_nets"], names);

    let ask = |extra: Value| {
        let mut ask = json!({"prompt": "a red square on a blue background", "steps": 4, "seed": 7});
        ask.as_object_mut().unwrap().extend(extra.as_object().unwrap().clone());
        ask
    };
    let picture = server.post("/sdapi/v1/txt2img", &ask(json!({"seed": 8}))).1["images"][0].clone();
    let unit = |model: &str| {
        let unit = json!({"image": picture, "module": "canny", "model": model, "weight": 1.0});
        ask(json!({"alwayson_scripts": {"controlnet": {"args": [unit]}}}))
    };
    let draw = |ask: &Value| {
        let (status, answer) = server.post("/sdapi/v1/txt2img", ask);
        assert_eq!((status, &answer["warnings"]), (200, &json!([])), "{answer}");
        sd_io::Image::decode(&decoded(&answer["images"][0])).unwrap().rgb().to_vec()
    };
    let (without, with) = (draw(&ask(json!({}))), draw(&unit("sd15/edges [d14c016b]")));
    assert!(with != without && with == draw(&unit("sd15/edges.safetensors")));
    assert!(without == draw(&ask(json!({}))), "something stayed");
    // The native API and prompts name it too, by a field of their own.
    let extra = json!({"control_net": "sd15/edges", "control_image": picture, "control_strength": 1.0});
    let prompt = format!("a red square on a blue background<sd_cpp_extra_args>{extra}</sd_cpp_extra_args>");
    let by_prompt = draw(&ask(json!({"prompt": prompt, "steps": 4})));
    assert!(by_prompt != without && by_prompt != with, "the picture is followed as it is");

    let inside = folder.to_str().unwrap();
    for (model, want) in [
        ("../server-controls/sd15/edges", "is outside of the folder of ControlNets"),
        (edges.to_str().unwrap(), "is outside of the folder of ControlNets"),
        ("depth", "ControlNet depth: not found in the folder of ControlNets"),
        ("broken", "ControlNet broken: broken.pth: "),
    ] {
        let (status, answer) = server.post("/sdapi/v1/txt2img", &unit(model));
        let told = answer["error"].as_str().unwrap();
        assert!(status == 400 && told.contains(want) && !told.contains(inside), "{told}");
    }
    let job = ask(json!({"control_image": picture, "control_net": "../x"}));
    let (status, answer) = server.post("/sdcpp/v1/img_gen", &job);
    assert!(status == 400 && answer["error"].as_str().unwrap().contains("is outside of"), "{answer}");
    assert!(with == draw(&unit("sd15/edges")), "refusals changed something");
}

#[test]
fn pictures_from_pictures() {
    let server = Server::start(&[]);
    let ask =
        json!({"prompt": "a red circle on a blue background", "width": 64, "height": 72, "steps": 8, "seed": 7});
    let first = server.post("/sdapi/v1/txt2img", &ask).1["images"][0].clone();
    let draw = |path: &str, extra: Value| {
        let mut ask = json!({"prompt": "a red circle", "steps": 8, "seed": 3});
        ask.as_object_mut().unwrap().extend(extra.as_object().unwrap().clone());
        let (status, answer) = server.post(path, &ask);
        assert_eq!(status, 200, "{answer}");
        decoded(&answer["images"][0])
    };
    let img2img = "/sdapi/v1/img2img";
    let url = format!("data:image/png;base64,{}", first.as_str().unwrap());
    let little = draw(img2img, json!({"init_images": [url], "denoising_strength": 0.2}));
    assert_eq!(png_size(&little), (64, 72), "the picture's own size");
    let much = draw(img2img, json!({"init_images": [first], "denoising_strength": 0.9}));
    let none = draw("/sdapi/v1/txt2img", json!({"width": 64, "height": 72}));
    let pixels = |bytes: &[u8]| sd_io::Image::decode(bytes).unwrap().rgb().to_vec();
    let start = pixels(&decoded(&first));
    let distance = |bytes: &[u8]| -> u64 {
        pixels(bytes).iter().zip(&start).map(|(a, b)| u64::from(a.abs_diff(*b)).pow(2)).sum()
    };
    let (little, much, none) = (distance(&little), distance(&much), distance(&none));
    assert!(little < much && little < none, "{little} {much} {none}");
}

#[test]
fn jobs_are_polled_and_cancelled() {
    let server = Server::start(&[]);
    let submit = |ask: &Value| {
        let (status, answer) = server.post("/sdcpp/v1/img_gen", ask);
        assert_eq!(
            (status, &answer["status"], &answer["kind"]),
            (202, &json!("queued"), &json!("img_gen")),
            "{answer}"
        );
        answer["poll_url"].as_str().unwrap().to_owned()
    };
    let wait = |url: &str, want: &[&str]| {
        let deadline = Instant::now() + DEADLINE;
        loop {
            assert!(Instant::now() < deadline, "{url}");
            let job = server.get(url);
            if want.iter().any(|status| job["status"] == *status) {
                return job;
            }
            std::thread::sleep(Duration::from_millis(2));
        }
    };
    let long = json!({"prompt": "a star", "batch_count": 8, "sample_params": {"sample_steps": 150}});
    let short =
        json!({"prompt": "a star", "width": 64, "height": 64, "seed": 5, "sample_params": {"sample_steps": 1}});
    let (running, waiting, last) = (submit(&long), submit(&long), submit(&short));
    wait(&running, &["generating"]);
    assert_eq!(server.get(&waiting)["queue_position"], 2);
    assert_eq!((&server.get(&waiting)["progress"], &server.get(&waiting)["preview"]), (&Value::Null, &Value::Null));
    let deadline = Instant::now() + DEADLINE;
    let seen = loop {
        let job = server.get(&running);
        if job["preview"] != Value::Null {
            break job;
        }
        assert!(Instant::now() < deadline, "{job}");
    };
    assert!(decoded(&seen["preview"]).starts_with(b"\x89PNG"));
    let progress = &seen["progress"];
    assert_eq!(
        (&progress["stage"], &progress["images"], &progress["steps"]),
        (&json!("denoising"), &json!(8), &json!(150))
    );
    for url in [&waiting, &running] {
        assert_eq!(server.post(&format!("{url}/cancel"), &json!({})).1["status"], "cancelled");
        assert_eq!(wait(url, &["cancelled"])["result"], Value::Null);
    }
    let job = wait(&last, &["completed"]);
    let image = &job["result"]["images"][0];
    assert_eq!((png_size(&decoded(&image["b64_json"])), &image["seed"]), ((64, 64), &json!(5)));
    assert!(
        job["completed"].as_u64() >= job["started"].as_u64() && job["started"].as_u64() >= job["created"].as_u64()
    );
    let failing = json!({"prompt": "x".repeat(70_000)});
    let job = wait(&submit(&failing), &["failed"]);
    assert!(job["error"]["message"].as_str().unwrap().starts_with("prompt: "), "{job}");
    for path in ["/sdcpp/v1/jobs/job_00ffffff", "/sdcpp/v1/jobs/%00", "/sdcpp/v1/jobs/..%2f.."] {
        assert_eq!(server.ask("GET", path, b"").0, 404, "{path}");
    }
    let tagged = json!({"prompt": "a<sd_cpp_extra_args>{\"sample_params\":{\"sample_steps\":1}}</sd_cpp_extra_args>",
        "size": "64x64", "seed": 5});
    let (status, answer) = server.post("/v1/images/generations", &tagged);
    let text = b"a\nSteps: 1, ";
    assert!(status == 200 && decoded(&answer["data"][0]["b64_json"]).windows(text.len()).any(|w| w == text));
}

#[test]
fn a_full_queue_refuses_before_it_reads() {
    let server = Server::start(&[]);
    let long = json!({"prompt": "a star", "batch_count": 8, "sample_params": {"sample_steps": 150}});
    for _ in 0..64 {
        assert_eq!(server.post("/sdcpp/v1/img_gen", &long).0, 202);
    }
    for path in ["/sdcpp/v1/img_gen", "/sdapi/v1/txt2img", "/sdapi/v1/img2img", "/v1/images/generations"] {
        let (status, answer) = server.ask("POST", path, b"not JSON");
        assert_eq!((status, &answer["error"]), (429, &json!("the queue is full, try again later")), "{path}");
    }
}

#[test]
fn hostile_requests_get_an_answer_that_names_the_fault() {
    let server = Server::start(&[]);
    let deep = "[".repeat(500_000);
    let long = json!({"prompt": "a".repeat(70_000)}).to_string();
    let brackets = json!({"prompt": "(".repeat(60_000), "steps": 1, "size": "8x8"}).to_string();
    let huge = vec![b'x'; (64 << 20) + 1];
    let openai = "/v1/images/generations";
    let webui = "/sdapi/v1/txt2img";
    let cases: &[(&str, &[u8], u16, &str)] = &[
        (openai, b"", 400, "empty"),
        (openai, b"\xff\xfe\x00", 400, "not JSON"),
        (openai, deep.as_bytes(), 400, "not JSON"),
        (openai, b"null", 400, "JSON object"),
        (openai, br#"{"prompt":{"a":1}}"#, 400, "prompt: "),
        (openai, br#"{"prompt":"a","n":1e300}"#, 400, "n: "),
        (openai, br#"{"prompt":"a","size":"4096x4096x4096"}"#, 400, "size: "),
        (openai, br#"{"prompt":"a","seed":9223372036854775807,"n":2}"#, 400, "seed: "),
        (openai, long.as_bytes(), 400, "prompt: want at most"),
        (openai, &huge, 413, "bytes"),
        (webui, br#"{"prompt":"a","seed":1e99}"#, 400, "seed: "),
        (webui, br#"{"prompt":"a","cfg_scale":1e39}"#, 400, "cfg_scale: "),
        (webui, br#"{"prompt":"a","sampler_name":"\u0000"}"#, 400, "sampler_name: "),
        (webui, br#"{"prompt":"a","scheduler":7}"#, 400, "scheduler: "),
        (webui, br#"{"prompt":"a","width":-64}"#, 400, "width: "),
        (webui, br#"{"prompt":"a\u0000b","steps":1,"width":64,"height":64}"#, 400, "NUL"),
        ("/sdapi/v1/img2img", br#"{"prompt":"a"}"#, 400, "init_images: "),
        ("/sdapi/v1/img2img", br#"{"init_images":["AAAA"]}"#, 400, "init_images: "),
        ("/sdapi/v1/img2img", br#"{"init_images":["%%"]}"#, 400, "init_images: want base64"),
        ("/sdapi/v1/img2img", br#"{"init_images":[7]}"#, 400, "init_images: want a list of strings"),
        ("/sdcpp/v1/img_gen", br#"{"init_image":"data:image/png;base64,"}"#, 400, "init_image: "),
        ("/sdapi/v1/options", b"[]", 400, "JSON object"),
    ];
    for (path, body, status, part) in cases {
        let (got, answer) = server.ask("POST", path, body);
        let shown: String = String::from_utf8_lossy(body).chars().take(80).collect();
        let message = answer["error"].as_str().unwrap_or_default();
        assert!(got == *status && message.contains(part), "{path} {shown}: {got} {answer}");
        assert!(message.len() < 1000, "{shown}: {message}");
    }
    // Brackets without an end are text.
    assert_eq!(server.ask("POST", openai, brackets.as_bytes()).0, 200);
    assert_eq!(server.get("/health")["status"], "ok");
}

#[test]
fn a_request_shows_its_progress_and_can_be_interrupted() {
    let server = Server::start(&[]);
    let ask = json!({"prompt": "a ring", "steps": 150, "batch_size": 8});
    std::thread::scope(|scope| {
        let request = scope.spawn(|| server.post("/sdapi/v1/txt2img", &ask));
        let deadline = Instant::now() + DEADLINE;
        loop {
            assert!(Instant::now() < deadline, "no progress");
            let progress = server.get("/sdapi/v1/progress");
            if progress["progress"].as_f64().unwrap() > 0.0 {
                assert_eq!(progress["state"]["sampling_steps"], 150);
                assert_eq!(progress["state"]["job_count"], 8);
                break;
            }
            std::thread::sleep(Duration::from_millis(2));
        }
        assert_eq!(server.post("/sdapi/v1/interrupt", &json!({})).0, 200);
        let (status, answer) = request.join().unwrap();
        if status == 200 {
            assert!(answer["images"].as_array().unwrap().len() < 8);
            assert!(answer["warnings"][0].as_str().unwrap().starts_with("interrupted"));
        } else {
            assert_eq!((status, answer), (409, json!({"error": "the request was interrupted"})));
        }
    });
    // Who goes away stops the work too.
    let mut stream = TcpStream::connect(server.address).unwrap();
    let body = ask.to_string();
    write!(stream, "POST /sdapi/v1/txt2img HTTP/1.1\r\nHost: x\r\nContent-Length: {}\r\n\r\n{body}", body.len())
        .unwrap();
    let deadline = Instant::now() + DEADLINE;
    let running = || server.get("/sdapi/v1/progress")["state"]["job"] != "";
    while !running() {
        assert!(Instant::now() < deadline, "the request does not start");
    }
    drop(stream);
    while running() {
        assert!(Instant::now() < deadline, "the request goes on without its client");
    }
}

#[cfg(unix)]
#[test]
fn a_signal_ends_it_in_good_order_and_in_time() {
    let mut server = Server::start(&[]);
    server.signal("TERM");
    assert!(server.rest().contains("stopped"));

    // Half of a head, half of a body, and a connection that says nothing.
    let mut server = Server::start(&[]);
    let starts = ["GET /hea", "POST /v1/images/generations HTTP/1.1\r\nHost: x\r\nContent-Length: 99\r\n\r\n{", ""];
    let mut streams: Vec<TcpStream> = starts.iter().map(|_| TcpStream::connect(server.address).unwrap()).collect();
    for (stream, start) in streams.iter_mut().zip(starts) {
        stream.write_all(start.as_bytes()).unwrap();
    }
    assert_eq!(server.get("/health")["status"], "ok");
    let begun = Instant::now();
    server.signal("TERM");
    assert!(server.rest().contains("stopped"));
    assert!(begun.elapsed() < Duration::from_secs(8), "{:?}", begun.elapsed());
}

#[test]
fn wrong_starts_end_with_a_message() {
    let server = Server::start(&[]);
    let port = server.address.port().to_string();
    for (args, part) in [
        (["--listen-port", port.as_str()], "listen on"),
        (["--listen-port", "70000"], "--listen-port"),
        (["--model", "/nowhere.safetensors"], "/nowhere.safetensors"),
        (["--serve-html-path", "/nowhere.html"], "--serve-html-path"),
        (["--backend", "nothing"], "--backend"),
        (["--steps", "0"], "--steps"),
        (["--t5xxl", "/nowhere.safetensors"], "/nowhere.safetensors"),
        (["--refiner", "/nowhere.safetensors"], "refiner: /nowhere.safetensors"),
        (["--vae-format", "sd9"], "--vae-format"),
    ] {
        let other = ["--listen-port", "0"];
        let before = if args[0] == "--listen-port" { &[][..] } else { &other[..] };
        let out = Command::new(env!("CARGO_BIN_EXE_sd-server")).args(before).args(args).output().unwrap();
        let text = String::from_utf8(out.stderr).unwrap();
        assert!(out.status.code() == Some(1) && text.contains(part), "{args:?}: {:?} {text}", out.status);
    }
}

#[test]
fn second_passes_and_masks() {
    let server = Server::start(&["--preview", "proj"]);
    let ask = json!({"prompt": "a red circle", "width": 64, "height": 64, "steps": 2, "enable_hr": true,
        "hr_upscaler": "Latent (nearest)", "hr_scale": 1.5, "denoising_strength": 0.5});
    let (status, answer) = server.post("/sdapi/v1/txt2img", &ask);
    assert_eq!(status, 200, "{answer}");
    let file = decoded(&answer["images"][0]);
    assert_eq!(png_size(&file), (96, 96));
    let info: Value = serde_json::from_str(answer["info"].as_str().unwrap()).unwrap();
    let text = info["infotexts"][0].as_str().unwrap();
    assert!(text.contains("Size: 64x64") && text.contains("Hires upscaler: Latent (nearest)"), "{text}");
    // The result's own colours are the mask.
    let picture = answer["images"][0].clone();
    let ask = json!({"prompt": "a blue circle", "width": 64, "height": 64, "steps": 2, "init_images": [picture],
        "mask": picture, "mask_blur": 2, "inpaint_full_res": true, "inpaint_full_res_padding": 8});
    let (status, answer) = server.post("/sdapi/v1/img2img", &ask);
    assert_eq!(status, 200, "{answer}");
    assert_eq!(png_size(&decoded(&answer["images"][0])), (96, 96), "the size is the picture's own");
    let ask = json!({"prompt": "a", "enable_hr": true, "hr_upscaler": "Model"});
    let (status, answer) = server.post("/sdapi/v1/txt2img", &ask);
    assert!(
        status == 400 && answer["error"].as_str().unwrap().starts_with("hires.upscaler: there is no"),
        "{answer}"
    );
    let ask = json!({"image": picture, "upscaler_1": "Lanczos", "upscaling_resize": 2});
    let (status, answer) = server.post("/sdapi/v1/extra-single-image", &ask);
    assert_eq!((status, png_size(&decoded(&answer["image"]))), (200, (192, 192)), "{answer}");
    let ask = json!({"image": picture, "upscaler_1": "Model", "upscaling_resize": 2});
    let (status, answer) = server.post("/sdapi/v1/extra-single-image", &ask);
    assert!(status == 400 && answer["error"].as_str().unwrap().starts_with("upscale: there is no"), "{answer}");
    let names = server.get("/sdapi/v1/latent-upscale-modes");
    assert_eq!(names[0]["name"], "Latent");
}

/// Runs what docs/server.md shows, so that it stays true. The server of the examples is at port 1234.
#[test]
fn the_examples_of_the_documentation_work() {
    let server = Server::start(&[]);
    let text = std::fs::read_to_string(concat!(env!("CARGO_MANIFEST_DIR"), "/../../docs/server.md")).unwrap();
    let folder = std::env::temp_dir().join(format!("sd-server-docs-{}", std::process::id()));
    std::fs::create_dir_all(&folder).unwrap();
    let blocks = text.split("```sh\n").skip(1).map(|rest| rest.split_once("```").unwrap().0);
    let examples: Vec<String> = blocks
        .filter(|block| block.contains("curl"))
        .map(|block| block.replace("localhost:1234", &server.address.to_string()))
        .collect();
    assert!(examples.len() >= 4, "{}", examples.len());
    for example in examples {
        let script =
            format!("set -eu\ncurl() {{ command curl --fail-with-body --noproxy '*' \"$@\"; }}\n{example}");
        let out = Command::new("sh").arg("-c").arg(script).current_dir(&folder).output().unwrap();
        let (stdout, stderr) = (String::from_utf8_lossy(&out.stdout), String::from_utf8_lossy(&out.stderr));
        assert!(out.status.success() && !stdout.contains("\"error\""), "{example}\n{stdout}\n{stderr}");
    }
    let mut pictures = 0;
    for file in std::fs::read_dir(&folder).unwrap() {
        let bytes = std::fs::read(file.unwrap().path()).unwrap();
        assert!(bytes.starts_with(b"\x89PNG") || bytes.starts_with(&[0xff, 0xd8, 0xff]));
        pictures += 1;
    }
    assert!(pictures >= 2, "{pictures}");
    std::fs::remove_dir_all(&folder).unwrap();
}
