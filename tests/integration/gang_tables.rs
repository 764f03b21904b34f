//! The cases that Kubernetes 1.37 holds for its own PodGroups, with GPU memory instead of CPU: who is preempted, and how
//! many pods are bound in the end. They follow `TestPodGroupPreemption`, `TestPodGroupScheduling` and
//! `TestPodGroupSchedulingWithPodAntiAffinity`. Left out are scheduler plugins of the tests' own, CompositePodGroups,
//! topology constraints and fields of alpha features. A comment names each row that ends otherwise than in Kubernetes.

use anyhow::Result;

use crate::gang_rig::{Row, Rule, hold, pods, row};

/// Four full nodes: pods of two priorities run there.
fn two_below_and_two_above(name: &'static str) -> Row {
    row(name, &[&[10], &[10], &[10], &[10]])
        .run(&["a", "b"], pods("low", 10))
        .run(&["c", "d"], pods("top", 10))
}

/// As above, with gangs that are disrupted as a whole.
fn two_whole_groups(name: &'static str) -> Row {
    row(name, &[&[10], &[10], &[10], &[10]])
        .gang("v", "middle", 2)
        .whole()
        .run(&["a", "b"], pods("middle", 10).of("v"))
        .gang("above", "top", 2)
        .whole()
        .run(&["c", "d"], pods("top", 10).of("above"))
}

/// Three full nodes: such a gang, and a pod of lower priority.
fn whole_group_and_a_pod(name: &'static str) -> Row {
    row(name, &[&[10], &[10], &[10]])
        .gang("v", "middle", 1)
        .whole()
        .run(&["a", "b"], pods("middle", 10).of("v"))
        .run(&["c"], pods("low", 10))
}

/// Which pods must go for a gang.
fn victims() -> Vec<Row> {
    vec![
        row("a gang takes the place of single pods", &[&[10, 10, 10]])
            .run(&["a", "b", "c"], pods("low", 10))
            .gang("g", "high", 3)
            .come(&["x", "y", "z"], pods("high", 10).of("g"))
            .until(&["a", "b", "c"], 3),
        row(
            "victims only as far as free memory lacks",
            &[&[20], &[10, 10]],
        )
        .run(&["all"], pods("low", 20).on(0))
        .run(&["half"], pods("low", 10).on(1))
        .gang("g", "high", 3)
        .come(&["x", "y", "z"], pods("high", 10).of("g"))
        .until(&["all"], 3),
        row("a budget spares its pods", &[&[10, 10, 10]])
            .budget()
            .run(&["safe-0", "safe-1"], pods("low", 10).app())
            .run(&["bare"], pods("low", 10))
            .gang("g", "high", 2)
            .come(&["x", "y"], pods("high", 5).of("g"))
            .until(&["bare"], 2),
        row("victims on several nodes", &[&[10, 10], &[10, 10]])
            .run(&["a", "b"], pods("low", 10).on(0))
            .run(&["c", "d"], pods("low", 10).on(1))
            .gang("g", "high", 4)
            .come(&["w", "x", "y", "z"], pods("high", 10).of("g"))
            .until(&["a", "b", "c", "d"], 4),
        row("none if all victims are too few", &[&[10, 10, 10]])
            .run(&["above"], pods("top", 10))
            .run(&["a", "b"], pods("low", 10))
            .gang("g", "high", 3)
            .come(&["x", "y", "z"], pods("high", 10).of("g"))
            .refused(&[], 0),
        row("the lowest priority first", &[&[10, 10, 10]])
            .run(&["between"], pods("middle", 10))
            .run(&["a", "b"], pods("low", 10))
            .gang("g", "high", 2)
            .come(&["x", "y"], pods("high", 10).of("g"))
            .until(&["a", "b"], 2),
        row("a gang goes as a whole", &[&[10, 10, 10]])
            .gang("v", "low", 3)
            .whole()
            .run(&["a", "b", "c"], pods("low", 10).of("v"))
            .gang("g", "high", 1)
            .come(&["x"], pods("high", 10).of("g"))
            .until(&["a", "b", "c"], 1),
        row("a basic group goes as a whole", &[&[10, 10, 10]])
            .basic("v", "low")
            .whole()
            .run(&["a", "b", "c"], pods("low", 10).of("v"))
            .gang("g", "high", 1)
            .come(&["x"], pods("high", 10).of("g"))
            .until(&["a", "b", "c"], 1),
        two_below_and_two_above("more than minCount, but no pod above")
            .gang("g", "high", 1)
            .come(&["x", "y", "z"], pods("high", 10).of("g"))
            .refused(&["a", "b"], 2),
        whole_group_and_a_pod("a whole group beside a lower pod")
            .gang("g", "high", 3)
            .come(&["x", "y", "z"], pods("high", 10).of("g"))
            .until(&["a", "b", "c"], 3),
        two_whole_groups("a whole group for a part above minCount")
            .gang("g", "high", 1)
            .whole()
            .come(&["x", "y", "z"], pods("high", 10).of("g"))
            .refused(&["a", "b"], 2),
        row("pods of a gang that never preempts", &[&[10, 10, 10]])
            .run(&["a", "b", "c"], pods("low", 10))
            .gang("g", "never", 3)
            .come(&["x", "y", "z"], pods("never", 10).of("g"))
            .refused(&[], 0),
        row("a free node and a full one", &[&[20], &[20]])
            .run(&["a"], pods("low", 20).on(0))
            .gang("g", "high", 2)
            .come(&["x", "y"], pods("high", 20).of("g"))
            .until(&["a"], 2),
        row("each pod on its own node", &[&[20], &[20]])
            .run(&["a"], pods("lowest", 10).on(0))
            .run(&["b"], pods("low", 10).on(0))
            .gang("g", "high", 2)
            .come(&["x"], pods("high", 10).of("g").on(0))
            .come(&["y"], pods("high", 10).of("g").on(1))
            .until(&["a"], 2),
        row("pods that join a bound gang", &[&[10, 10, 10, 10]])
            .gang("g", "high", 2)
            .run(&["v", "w"], pods("high", 10).of("g"))
            .run(&["a"], pods("low", 10))
            .come(&["x", "y"], pods("high", 10).of("g"))
            .until(&["a"], 2),
        row("pods beyond minCount", &[&[10, 10, 10, 10]])
            .run(&["a", "b", "c", "d"], pods("low", 10))
            .gang("g", "high", 3)
            .come(&["w", "x", "y", "z"], pods("high", 10).of("g"))
            .until(&["a", "b", "c", "d"], 4),
        row("the lower two of four", &[&[10, 10, 10, 10]])
            .run(&["a", "b"], pods("lowest", 10))
            .run(&["c", "d"], pods("low", 10))
            .gang("g", "middle", 2)
            .come(&["x", "y"], pods("middle", 10).of("g"))
            .until(&["a", "b"], 2),
    ]
}

/// The victims of the pods of a group with the policy `basic`.
fn victims_of_basic_groups() -> Vec<Row> {
    vec![
        row("basic: the place of single pods", &[&[10, 10, 10]])
            .run(&["a", "b", "c"], pods("low", 10))
            .basic("g", "high")
            .come(&["x", "y", "z"], pods("high", 10).of("g"))
            .until(&["a", "b", "c"], 3),
        // Kubernetes' row ends with the other pod, by a score of its own.
        row("basic: the lowest priority of two nodes", &[&[20], &[20]])
            .run(&["a"], pods("low", 10).on(0))
            .run(&["b"], pods("lowest", 10).on(1))
            .basic("g", "high")
            .come(&["x", "y", "z"], pods("high", 10).of("g"))
            .until(&["b"], 3),
        two_below_and_two_above("basic: as many as fit below")
            .basic("g", "high")
            .come(&["x", "y", "z"], pods("high", 10).of("g"))
            .refused(&["a", "b"], 2),
        // Only a gang preempts a group with `disruptionMode: all`.
        whole_group_and_a_pod("basic: no whole group")
            .basic("g", "high")
            .come(&["x", "y", "z"], pods("high", 10).of("g"))
            .refused(&["c"], 1),
        two_whole_groups("basic: none of two whole groups")
            .basic("g", "high")
            .whole()
            .come(&["x", "y", "z"], pods("high", 10).of("g"))
            .refused(&[], 0),
        row("basic: pods that join bound ones", &[&[10, 10, 10, 10]])
            .basic("g", "high")
            .run(&["v", "w"], pods("high", 10).of("g"))
            .run(&["a"], pods("low", 10))
            .come(&["x", "y"], pods("high", 10).of("g"))
            .until(&["a"], 2),
        row("basic: one large pod for four", &[&[20, 20]])
            .run(&["a"], pods("low", 20))
            .basic("g", "high")
            .come(&["w", "x", "y", "z"], pods("high", 10).of("g"))
            .until(&["a"], 4),
    ]
}

/// kube-scheduler refuses the node for more than memory. If the gang's memory is free, kube-scheduler itself preempts.
fn rules() -> Vec<Row> {
    vec![
        row("anti-affinity to a pod on a full node", &[&[20], &[20]])
            .run(&["a"], pods("low", 20).on(0).app())
            .gang("g", "high", 2)
            .come(&["x", "y"], pods("high", 20).of("g").with(Rule::Apart))
            .until(&["a"], 2),
        row(
            "anti-affinity to a pod that stays on a full node",
            &[&[10, 10], &[10, 10]],
        )
        .run(&["a"], pods("top", 10).on(0).app())
        .run(&["b"], pods("lowest", 10).on(0))
        .run(&["c"], pods("low", 10).on(1))
        .run(&["d"], pods("top", 10).on(1))
        .gang("g", "high", 1)
        .come(&["x"], pods("high", 10).of("g").with(Rule::Apart))
        .until(&["c"], 1),
        row(
            "anti-affinity within a gang on full nodes",
            &[&[10, 10], &[10, 10]],
        )
        .run(&["a"], pods("lowest", 10).on(0))
        .run(&["b"], pods("low", 10).on(0))
        .run(&["c"], pods("middle", 10).on(1))
        .run(&["d"], pods("top", 10).on(1))
        .gang("g", "high", 2)
        .come(
            &["x", "y"],
            pods("high", 10).of("g").app().with(Rule::Apart),
        )
        .until(&["a", "c"], 2),
        row("anti-affinity to a small pod", &[&[20], &[20]])
            .run(&["a"], pods("low", 2).on(0).app())
            .gang("g", "high", 2)
            .come(&["x", "y"], pods("high", 15).of("g").with(Rule::Apart))
            .until(&["a"], 2),
        row("a port of the node", &[&[20], &[20]])
            .run(&["a"], pods("low", 2).on(0).with(Rule::Port))
            .gang("g", "high", 2)
            .come(&["x", "y"], pods("high", 15).of("g").with(Rule::Port))
            .until(&["a"], 2),
        row("a spread over nodes", &[&[40], &[40]])
            .run(&["a"], pods("low", 1).on(0).app())
            .run(&["b"], pods("lowest", 1).on(1).app())
            .gang("g", "high", 2)
            .come(
                &["x", "y"],
                pods("high", 1).of("g").on(0).app().with(Rule::Spread),
            )
            .until(&["a"], 2),
    ]
}

/// How gangs and groups are bound if no pod may be preempted for them.
fn scheduled() -> Vec<Row> {
    const ONE: &[&[u64]] = &[&[20, 20]];
    vec![
        row("a gang that fits, and one pod more", ONE)
            .gang("g", "high", 3)
            .come(&["x", "y", "z"], pods("high", 10).of("g"))
            .until(&[], 3)
            .come(&["w"], pods("high", 10).of("g"))
            .until(&[], 4),
        row("too few pods for the gang, then enough", ONE)
            .gang("g", "high", 3)
            .come(&["x", "y"], pods("high", 10).of("g"))
            .run(&["later"], pods("high", 0))
            .until(&[], 0)
            .come(&["z"], pods("high", 10).of("g"))
            .until(&[], 3),
        row("a gang waits for its group, then for memory", ONE)
            .run(&["a"], pods("high", 20))
            .come(&["x", "y", "z"], pods("high", 10).of("g"))
            .run(&["later"], pods("high", 0))
            .until(&[], 0)
            .gang("g", "high", 3)
            .refused(&[], 0)
            .delete("a")
            .until(&[], 3),
        row("minCount is bound, the rest waits for memory", ONE)
            .run(&["a"], pods("high", 10))
            .come(&["w", "x", "y", "z"], pods("high", 10).of("g"))
            .gang("g", "high", 3)
            .refused(&[], 3)
            .delete("a")
            .until(&[], 4),
        row("of two gangs one is bound", ONE)
            .gang("f", "high", 3)
            .gang("g", "high", 3)
            .come(&["u"], pods("high", 10).of("f"))
            .come(&["x"], pods("high", 10).of("g"))
            .come(&["v"], pods("high", 10).of("f"))
            .come(&["y"], pods("high", 10).of("g"))
            .come(&["w"], pods("high", 10).of("f"))
            .come(&["z"], pods("high", 10).of("g"))
            .refused(&[], 3),
        row("a single pod among those of a gang", ONE)
            .gang("g", "high", 3)
            .run(&["a"], pods("high", 20))
            .come(&["x", "y", "z"], pods("high", 10).of("g"))
            .refused(&[], 0),
        row("pods of a basic group come one by one", ONE)
            .basic("g", "high")
            .come(&["x"], pods("high", 10).of("g"))
            .until(&[], 1)
            .come(&["y", "z"], pods("high", 10).of("g"))
            .until(&[], 3),
        row("a basic group waits for its group, then for memory", ONE)
            .run(&["a"], pods("high", 20))
            .come(&["x", "y", "z"], pods("high", 10).of("g"))
            .run(&["later"], pods("high", 0))
            .until(&[], 0)
            .basic("g", "high")
            .refused(&[], 2)
            .delete("a")
            .until(&[], 3),
        row("minCount is lowered to the pods that are there", ONE)
            .gang("g", "high", 5)
            .come(&["w", "x", "y", "z"], pods("high", 10).of("g"))
            .run(&["later"], pods("high", 0))
            .until(&[], 0)
            .min_count("g", 4)
            .until(&[], 4),
        row("minCount is lowered to the pods that fit", ONE)
            .gang("g", "high", 5)
            .come(&["v", "w", "x", "y", "z"], pods("high", 10).of("g"))
            .refused(&[], 0)
            .min_count("g", 4)
            .refused(&[], 4),
        row("minCount is raised further", ONE)
            .gang("g", "high", 5)
            .come(&["w", "x", "y", "z"], pods("high", 10).of("g"))
            .min_count("g", 6)
            .run(&["later"], pods("high", 0))
            .until(&[], 0),
        row("anti-affinity within a gang on two nodes", &[&[20], &[20]])
            .gang("g", "high", 2)
            .come(
                &["x"],
                pods("high", 10).of("g").app().on(0).with(Rule::Apart),
            )
            .come(&["y"], pods("high", 10).of("g").app())
            .until(&[], 2),
        row("anti-affinity within a gang on one node", &[&[20]])
            .gang("g", "high", 2)
            .come(&["x"], pods("high", 10).of("g").app().with(Rule::Apart))
            .come(&["y"], pods("high", 10).of("g").app())
            .refused(&[], 0),
    ]
}

#[tokio::test]
async fn pods_are_preempted_for_groups_as_in_kubernetes_own_table() -> Result<()> {
    let rows = [victims(), victims_of_basic_groups(), rules()];
    hold(rows.into_iter().flatten().collect()).await
}

#[tokio::test]
async fn groups_are_scheduled_as_in_kubernetes_own_table() -> Result<()> {
    hold(scheduled()).await
}
