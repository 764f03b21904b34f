//! kube-scheduler's protocol to the letter, against an extender that watches a real API server: the requests of
//! upstream's own tests, and requests that clients should not send.

use anyhow::{Context as _, Result, ensure};
use axum::http::{Request, header};
use gpustow_api::names;
use gpustow_testkit::Case;
use kube::ResourceExt as _;
use kube::api::{DeleteParams, Patch, PatchParams};
use kube::{Client, Config};
use serde_json::{Value, json};
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::TcpStream;
use tokio::time::timeout;

use crate::fault_rig::{Replica, now, turn};
use crate::support::{SOON, node_of};

const CARD: u64 = 8192;
/// Upstream's, and a UID, which every pod of a scheduler has.
const POD: &str =
    r#"{"metadata":{"name":"podname","uid":"u"},"spec":{"containers":null},"status":{}}"#;

/// As above, with keys in lower case, as Go's decoder would accept it.
fn lower(text: &str) -> String {
    let keys = [
        "Pod",
        "Nodes",
        "NodeNames",
        "PodName",
        "PodNamespace",
        "PodUID",
        "Node",
        "Pods",
        "UID",
        "NodeNameToMetaVictims",
        "NodeNameToVictims",
        "NumPDBViolations",
    ];
    keys.into_iter().fold(text.to_owned(), |text, key| {
        text.replace(
            &format!("\"{key}\":"),
            &format!("\"{}\":", key.to_lowercase()),
        )
    })
}

async fn answer(replica: &Replica, verb: &str, body: impl Into<Vec<u8>>) -> Result<Value> {
    let (status, answer) = replica.extender.call(verb, body).await?;
    assert_eq!(status, 200, "/{verb}");
    Ok(answer)
}

#[tokio::test]
async fn what_upstreams_own_tests_send_is_understood_in_either_case() -> Result<()> {
    let turn = turn().await?;
    let replica = Replica::start(turn.cluster, "fixtures", &[]).await?;
    let args = format!(
        r#"{{"Pod":{POD},"Nodes":{{"metadata":{{}},"items":[{{"metadata":{{"name":"node1"}}}}]}},"NodeNames":["node1"]}}"#
    );
    let bind = r#"{"PodName":"mypodname","PodNamespace":"mypodnamespace","PodUID":"mypoduid","Node":"mynode"}"#;
    let victims = r#"{"foo":{"Pods":[{"UID":"myuid"}],"NumPDBViolations":1}}"#;
    let preempt =
        format!(r#"{{"Pod":{POD},"NodeNameToVictims":null,"NodeNameToMetaVictims":{victims}}}"#);
    for form in [str::to_owned, lower] {
        let filtered = json!({
            "Nodes": null, "NodeNames": ["node1"], "FailedNodes": {},
            "FailedAndUnresolvableNodes": {}, "Error": "",
        });
        assert_eq!(answer(&replica, "filter", form(&args)).await?, filtered);
        let scores = json!([{ "Host": "node1", "Score": 0 }]);
        assert_eq!(answer(&replica, "prioritize", form(&args)).await?, scores);
        let gone = json!({ "Error": "gpustow: the pod is gone" });
        assert_eq!(answer(&replica, "bind", form(bind)).await?, gone);
        let kept: Value = serde_json::from_str(victims)?;
        let kept = json!({ "NodeNameToMetaVictims": kept });
        assert_eq!(answer(&replica, "preempt", form(&preempt)).await?, kept);
    }
    Ok(())
}

#[tokio::test]
async fn rubbish_is_answered_with_what_each_verb_has_for_failures() -> Result<()> {
    let turn = turn().await?;
    let replica = Replica::start(turn.cluster, "rubbish", &[]).await?;
    let deep = "[".repeat(100_000);
    let nested = format!(r#"{{"Pod":{POD},"x":{deep}"#);
    let bodies: [&[u8]; 9] = [
        b"",
        b"null",
        b"[]",
        b"{}",
        br#"{"Pod":null}"#,
        br#"{"Pod":1,"NodeNames":{}}"#,
        b"\xff\xfe",
        deep.as_bytes(),
        nested.as_bytes(),
    ];
    for body in bodies {
        for verb in ["filter", "bind"] {
            let answer = answer(&replica, verb, body).await?;
            let error = answer["Error"].as_str().context("no Error")?;
            assert!(error.starts_with("gpustow: "), "/{verb}: {error}");
        }
        assert_eq!(answer(&replica, "prioritize", body).await?, json!([]));
        let none = json!({ "NodeNameToMetaVictims": {} });
        assert_eq!(answer(&replica, "preempt", body).await?, none);
    }
    replica.has_no_reservation().await
}

#[tokio::test]
async fn lists_may_be_null_or_many_mib_long_or_name_unknown_nodes() -> Result<()> {
    let turn = turn().await?;
    let replica = Replica::start(turn.cluster, "lists", &[]).await?;
    let pod = |mib: u64| {
        let limits = json!({ names::GPU_MEM: mib.to_string() });
        json!({
            "metadata": { "name": "p", "namespace": "default", "uid": format!("u{mib}") },
            "spec": { "containers": [{ "name": "main", "resources": { "limits": limits } }] },
        })
    };
    let filter = async |pod: Value, names: Value, nodes: Value| {
        let body = json!({ "Pod": pod, "NodeNames": names, "Nodes": nodes });
        answer(&replica, "filter", body.to_string()).await
    };
    let none = filter(pod(1), Value::Null, Value::Null).await?;
    assert_eq!(
        (&none["NodeNames"], &none["Error"]),
        (&json!([]), &json!(""))
    );

    let whole = json!({ "items": [{ "metadata": { "name": "n" } }] });
    let error = filter(pod(1), Value::Null, whole.clone()).await?;
    let error = error["Error"].as_str().unwrap_or_default();
    assert!(error.contains("nodeCacheCapable: true"), "{error}");
    let body = json!({ "Pod": pod(1), "NodeNames": null, "Nodes": whole }).to_string();
    assert_eq!(answer(&replica, "prioritize", body).await?, json!([]));
    let victims = json!({ "n": { "Pods": [pod(2)], "NumPDBViolations": 0 } });
    let body = json!({ "Pod": pod(1), "NodeNameToVictims": victims }).to_string();
    let nowhere = json!({ "NodeNameToMetaVictims": {} });
    assert_eq!(answer(&replica, "preempt", body).await?, nowhere);

    let names: Vec<String> = (0..200_000)
        .map(|i| format!("node-of-a-long-name-{i:0>40}"))
        .collect();
    let zero = filter(pod(0), json!(names), Value::Null).await?;
    assert_eq!(zero["NodeNames"], json!(names));
    let unknown = filter(pod(1), json!(names), Value::Null).await?;
    assert_eq!(unknown["NodeNames"], json!([]));
    let refused = &unknown["FailedAndUnresolvableNodes"];
    assert_eq!(refused.as_object().map(|map| map.len()), Some(names.len()));
    assert_eq!(
        refused[&names[7]],
        json!("no GPU report from a gpustow agent")
    );
    replica.has_no_reservation().await
}

#[tokio::test]
async fn a_pod_that_asks_for_zero_is_bound_without_an_assignment() -> Result<()> {
    let turn = turn().await?;
    let replica = Replica::start(turn.cluster, "zero", &[]).await?;
    let case = Case::new(turn.cluster, "zero").await?;
    case.node("n", &[CARD]).create(&case.client).await?;
    let n = case.node_name("n");
    let pod = case.pod("p").gpu_mem(0).create(&case.client).await?;
    replica.filter(&pod, &n).await?;
    replica.bind(&pod, &n).await?;
    replica.bind(&pod, &n).await?;
    let bound = now(&case, &pod).await?;
    assert_eq!(node_of(&bound), n);
    assert!(!bound.annotations().contains_key(names::ASSIGNMENT));
    case.end().await
}

#[tokio::test]
async fn a_pod_that_cannot_be_bound_is_explained_and_holds_nothing() -> Result<()> {
    let turn = turn().await?;
    let replica = Replica::start(turn.cluster, "conflicts", &[]).await?;
    let case = Case::new(turn.cluster, "conflicts").await?;
    for name in ["n", "other"] {
        case.node(name, &[CARD; 4]).create(&case.client).await?;
    }
    let (n, other) = (case.node_name("n"), case.node_name("other"));
    let refused = async |pod: &_, node: &str, text: &str| -> Result<()> {
        let error = replica
            .bind(pod, node)
            .await
            .err()
            .context("bound")?
            .to_string();
        assert!(error.contains(text), "{error}");
        replica.settled(&case).await
    };

    let bound = case.pod("bound").gpu_mem(CARD).create(&case.client).await?;
    replica.place(&bound, &n).await?;
    // Asked twice, it is the same bind.
    replica.bind(&bound, &n).await?;
    refused(&bound, &other, &format!("bound to node {n} already")).await?;

    let first = case.pod("again").gpu_mem(CARD).create(&case.client).await?;
    replica.until_fits(&first, &n).await?;
    case.pods()
        .delete("again", &DeleteParams::default().grace_period(0))
        .await?;
    let second = case.pod("again").gpu_mem(CARD).create(&case.client).await?;
    refused(&first, &n, "the pod is gone").await?;
    replica.place(&second, &n).await?;
    // kube-scheduler may not have seen the deletion yet that our watch has shown.
    let gone = replica
        .filter(&first, &n)
        .await
        .err()
        .context("it passes")?;
    assert!(gone.to_string().contains("has been deleted"), "{gone}");
    refused(&first, &n, "the pod is gone").await?;

    let gated = case.pod("gated").gpu_mem(CARD).with(|spec| {
        let gate = k8s_openapi::api::core::v1::PodSchedulingGate {
            name: "test/gate".into(),
        };
        spec.scheduling_gates = Some(vec![gate]);
    });
    let gated = gated.create(&case.client).await?;
    refused(&gated, &n, "scheduling gates").await?;

    let leaving = case
        .pod("leaving")
        .gpu_mem(CARD)
        .create(&case.client)
        .await?;
    replica.until_fits(&leaving, &n).await?;
    let finalizer = |list: Value| Patch::Merge(json!({ "metadata": { "finalizers": list } }));
    let hold = finalizer(json!(["test/hold"]));
    case.pods()
        .patch("leaving", &PatchParams::default(), &hold)
        .await?;
    case.pods()
        .delete("leaving", &DeleteParams::default().grace_period(0))
        .await?;
    refused(&leaving, &n, "being deleted").await?;
    let free = finalizer(Value::Null);
    case.pods()
        .patch("leaving", &PatchParams::default(), &free)
        .await?;

    let large = case
        .pod("large")
        .gpu_mem(2 * CARD)
        .create(&case.client)
        .await?;
    refused(&large, &n, "no GPU as large").await?;

    let note = "v".repeat(245 << 10);
    let wordy = case.pod("wordy").gpu_mem(CARD).annotation("note", &note);
    let reason = wordy.create(&case.client).await.err().context("created")?;
    let reason = format!("{reason:#}");
    assert!(
        reason.contains("metadata.annotations: they have "),
        "{reason}"
    );
    case.end().await
}

#[tokio::test]
async fn a_bind_against_the_pods_own_constraints_is_refused() -> Result<()> {
    let turn = turn().await?;
    let replica = Replica::start(turn.cluster, "against", &[]).await?;
    let case = Case::new(turn.cluster, "against").await?;
    case.node("n", &[CARD]).create(&case.client).await?;
    let n = case.node_name("n");
    let right = case.pod("right").gpu_mem(1).create(&case.client).await?;
    replica.until_fits(&right, &n).await?;
    for (name, mib) in [("asks", CARD / 2), ("asks-not", 0)] {
        let pod = case.pod(name).gpu_mem(mib).node_selector("nowhere", "yes");
        let pod = pod.create(&case.client).await?;
        let refused = replica.bind(&pod, &n).await.err().context("bound")?;
        assert!(
            refused.to_string().contains("is not for this pod"),
            "{refused}"
        );
        assert_eq!(node_of(&now(&case, &pod).await?), "");
    }
    replica.bind(&right, &n).await?;
    replica.settled(&case).await?;
    case.end().await
}

#[tokio::test]
async fn what_a_web_page_can_make_a_browser_send_is_refused() -> Result<()> {
    let turn = turn().await?;
    let replica = Replica::start(turn.cluster, "page", &[]).await?;
    let case = Case::new(turn.cluster, "page").await?;
    case.node("n", &[CARD]).create(&case.client).await?;
    let pod = case.pod("p").gpu_mem(CARD).create(&case.client).await?;
    replica.until_fits(&pod, &case.node_name("n")).await?;
    let body = json!({
        "PodName": "p", "PodNamespace": case.namespace, "PodUID": pod.uid(),
        "Node": case.node_name("n"),
    });
    let mut config = Config::new(replica.extender.url.parse()?);
    config.default_retry = false;
    let client = Client::try_from(config)?;
    let send = async |kind: Option<&str>, host: &str| -> Result<u16> {
        let mut call = Request::post("/bind").header(header::HOST, host);
        if let Some(kind) = kind {
            call = call.header(header::CONTENT_TYPE, kind);
        }
        let call = call.body(kube::client::Body::from(body.to_string().into_bytes()))?;
        Ok(client.send(call).await?.status().as_u16())
    };
    let json = Some("application/json");
    for (kind, host, status) in [
        (Some("text/plain"), "localhost", 415),
        (Some("application/x-www-form-urlencoded"), "127.0.0.1", 415),
        (None, "127.0.0.1", 415),
        (json, "evil.example", 421),
        (json, "evil.example:32766", 421),
        (json, "127.0.0.1.evil.example", 421),
    ] {
        assert_eq!(send(kind, host).await?, status, "{kind:?} {host}");
        assert_eq!(node_of(&now(&case, &pod).await?), "");
    }
    let charset = Some("application/json; charset=utf-8");
    assert_eq!(send(charset, "localhost:1").await?, 200);
    assert_eq!(node_of(&now(&case, &pod).await?), case.node_name("n"));
    case.end().await
}

#[tokio::test]
async fn large_calls_that_never_end_leave_room_for_ordinary_ones() -> Result<()> {
    let turn = turn().await?;
    let replica = Replica::start(turn.cluster, "large", &[]).await?;
    let address = replica.extender.url.trim_start_matches("http://");
    // All of a call but its last byte: it holds its room until that comes, or no client waits any more.
    let large = vec![b' '; 15 << 20];
    let head = format!(
        "POST /filter HTTP/1.1\r\nhost: {address}\r\ncontent-type: application/json\r\n\
         content-length: {}\r\n\r\n",
        large.len() + 1
    );
    let mut open = Vec::new();
    for _ in 0..4 {
        let mut connection = TcpStream::connect(address).await?;
        connection.write_all(head.as_bytes()).await?;
        connection.write_all(&large).await?;
        open.push(connection);
    }
    let told = async || -> Result<String> {
        let answer = answer(&replica, "filter", vec![b' '; 6 << 20]).await?;
        Ok(answer["Error"].as_str().unwrap_or_default().to_owned())
    };
    // The oldest of them ends for it.
    let told = told().await?;
    ensure!(told.contains("cannot read the call"), "{told}");
    let small =
        json!({"Pod": {"metadata": {"uid": "u"}, "spec": {"containers": []}}, "NodeNames": ["n"]});
    let small = answer(&replica, "filter", small.to_string()).await?;
    assert_eq!(small["NodeNames"], json!(["n"]));
    let mut said = [0; 4096];
    let oldest = open.first_mut().context("no connection")?;
    let count = timeout(SOON, oldest.read(&mut said)).await??;
    let said = String::from_utf8_lossy(&said[..count]);
    ensure!(said.contains("too many large calls at once"), "{said}");
    Ok(())
}

#[tokio::test]
async fn half_sent_requests_keep_no_client_from_the_health_port() -> Result<()> {
    let turn = turn().await?;
    let replica = Replica::start(turn.cluster, "half", &[]).await?;
    let address = replica.extender.health_url.trim_start_matches("http://");
    let mut open = Vec::new();
    for _ in 0..300 {
        let mut connection = TcpStream::connect(address).await?;
        connection.write_all(b"GET /healthz HTTP/1.1\r\n").await?;
        open.push(connection);
    }
    assert_eq!(replica.extender.ready().await?, 200);
    // The oldest had to go for the newest; the others have some time to go on.
    for connection in [0, 299] {
        let mut rest = Vec::new();
        let ended = open[connection].read_to_end(&mut rest);
        let _ = tokio::time::timeout(SOON, ended)
            .await
            .with_context(|| format!("connection {connection} is kept"))?;
    }
    assert_eq!(replica.extender.ready().await?, 200);
    Ok(())
}
